// Python bindings: check tensors, call the library. No arithmetic but the CPU twin's GEMM, which is
// torch's. The only file beside glance.h that knows torch.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "cpu/rank.h"
#include "glance.h"
#include "planner/planner.h"

namespace py = pybind11;
using tilemoe::Glance;
using tilemoe::PlanParams;
using tilemoe::PlanSizes;

namespace {

namespace cpu = tilemoe::cpu;

cpu::DType dtype_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return cpu::DType::f32;
    case at::kBFloat16:
      return cpu::DType::bf16;
    case at::kHalf:
      return cpu::DType::f16;
    default:
      throw py::value_error(std::string(name) + " has dtype " +
                            c10::toString(tensor.scalar_type()) +
                            ", wanted float32, bfloat16 or float16");
  }
}

std::string shape_text(at::IntArrayRef shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

// Contiguous, on the CPU, of this shape and dtype: what the library takes for granted.
void check(const at::Tensor& tensor, const char* name, at::IntArrayRef shape,
           at::ScalarType dtype) {
  if (tensor.device().is_cpu() && tensor.scalar_type() == dtype && tensor.sizes() == shape &&
      tensor.is_contiguous()) {
    return;
  }
  throw py::value_error(std::string(name) + " is " + c10::toString(tensor.scalar_type()) + " " +
                        shape_text(tensor.sizes()) + " on " + tensor.device().str() +
                        (tensor.is_contiguous() ? "" : ", not contiguous") + "; wanted " +
                        c10::toString(dtype) + " " + shape_text(shape) + " on cpu, contiguous");
}

void demand(bool holds, const std::string& what) {
  if (!holds) throw py::value_error(what);
}

// Width of a row of `bytes` bytes in elements of `tensor`'s dtype.
std::int64_t width_of(std::int64_t bytes, const at::Tensor& tensor) {
  return bytes / static_cast<std::int64_t>(tensor.element_size());
}

// Nanoseconds, at most 30 years: a deadline beyond that is none.
std::int64_t nanoseconds(double seconds) {
  return static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9);
}

std::byte* data(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

at::ScalarType scalar_type(cpu::DType dtype) {
  return dtype == cpu::DType::f32    ? at::kFloat
         : dtype == cpu::DType::bf16 ? at::kBFloat16
                                     : at::kHalf;
}

void torch_gemm(const cpu::GemmTile& tile, at::ScalarType dtype) {
  const auto view = [&](const std::byte* at, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::from_blob(const_cast<std::byte*>(at), size, stride, at::TensorOptions(dtype));
  };
  const at::Tensor a = view(tile.a, {tile.m, tile.k}, {tile.k, 1});
  const at::Tensor b = view(tile.b, {tile.k, tile.n}, {1, tile.k});
  at::Tensor c = view(tile.c, {tile.m, tile.n}, {tile.ldc, 1});
  if (tile.bias == nullptr) {
    at::mm_out(c, a, b);
  } else {
    at::addmm_out(c, view(tile.bias, {tile.n}, {1}), a, b);
  }
}

// The tile protocol of one rank, for ds_tilemoe/backends/cpu.py.
class PyRank {
 public:
  PyRank(const at::Tensor& region, int rank, int world, int max_experts,
         std::int64_t dispatch_bytes, std::int64_t recv_bytes, std::int64_t max_tokens,
         double wait_timeout_s, double group_timeout_s, std::vector<std::int64_t> pids)
      : region_(region),
        rank_(checked(region, {{world, max_experts, dispatch_bytes, recv_bytes},
                               rank,
                               data(region),
                               max_tokens,
                               nanoseconds(wait_timeout_s),
                               nanoseconds(group_timeout_s),
                               std::move(pids)})) {
    rank_.interrupted = [] {
      py::gil_scoped_acquire gil;
      return PyErr_CheckSignals() != 0;
    };
  }

  void begin(const std::string& name, std::uint64_t fingerprint, const PlanParams& params,
             std::int64_t in_row_bytes, std::int64_t out_row_bytes, const at::Tensor& expert_ids,
             const std::optional<std::string>& routing_error) {
    demand(expert_ids.dim() == 2, "expert_ids has " + std::to_string(expert_ids.dim()) +
                                      " dimensions, wanted [tokens, topk]");
    check(expert_ids, "expert_ids", expert_ids.sizes(), at::kInt);
    has_plan_ = false;
    in_row_bytes_ = in_row_bytes;
    out_row_bytes_ = out_row_bytes;
    name_ = name;
    local_experts_ = params.local_experts;
    topk_ = expert_ids.size(1);
    tokens_ = expert_ids.size(0);
    py::gil_scoped_release release;
    rank_.begin({name_.c_str(), fingerprint, static_cast<std::int32_t>(topk_), in_row_bytes,
                 out_row_bytes, params},
                expert_ids.data_ptr<std::int32_t>(), tokens_,
                routing_error ? routing_error->c_str() : nullptr);
    has_plan_ = true;
  }

  void dispatch(const at::Tensor& x) {
    demand_plan();
    dtype_of(x, "x");
    check(x, "x", {tokens_, width_of(in_row_bytes_, x)}, x.scalar_type());
    py::gil_scoped_release release;
    rank_.dispatch(data(x));
  }

  void wait_expert(int local_expert) {
    demand_plan();
    demand(
        local_expert >= 0 && local_expert < local_experts_,
        "local expert " + std::to_string(local_expert) + " of " + std::to_string(local_experts_));
    py::gil_scoped_release release;
    rank_.wait_expert(local_expert);
  }

  // Rows of the layout as peers send them, [plan rows, width]; valid until the next begin().
  at::Tensor dispatched(const at::Tensor& like) {
    demand_plan();
    return at::from_blob(
        rank_.dispatch_buffer(), {rank_.plan().sizes.rows, width_of(in_row_bytes_, like)},
        [region = region_](void*) {}, like.options());
  }

  void combine(const at::Tensor& hidden, const at::Tensor& out,
               const std::vector<at::Tensor>& weights,
               const std::vector<std::optional<at::Tensor>>& biases, int tile_n, int group_bands,
               int num_consumers, int mover) {
    demand_plan();
    const cpu::DType dtype = dtype_of(hidden, "hidden");
    demand(hidden.dim() == 2, "hidden is not a matrix");
    const std::int64_t rows = rank_.plan().sizes.rows, k = hidden.size(1),
                       n = width_of(out_row_bytes_, hidden);
    demand(static_cast<int>(weights.size()) == local_experts_ && weights.size() == biases.size(),
           "got " + std::to_string(weights.size()) + " weights and " +
               std::to_string(biases.size()) + " biases, wanted " + std::to_string(local_experts_) +
               " of each");
    demand(tile_n >= 1 && group_bands >= 1 && num_consumers >= 1 && mover >= 0 && mover <= 2,
           "tile_n, group_bands and num_consumers must be at least 1, mover 0, 1 or 2");
    check(hidden, "hidden", {rows, k}, hidden.scalar_type());
    check(out, "out", {rows, n}, hidden.scalar_type());
    cpu::CombineArgs args;
    args.hidden = data(hidden);
    args.out = data(out);
    for (std::size_t e = 0; e < weights.size(); ++e) {
      check(weights[e], "down_weight", {n, k}, hidden.scalar_type());
      args.weight.push_back(data(weights[e]));
      if (biases[e]) check(*biases[e], "down_bias", {n}, hidden.scalar_type());
      args.bias.push_back(biases[e] ? data(*biases[e]) : nullptr);
    }
    args.dtype = dtype;
    args.n = static_cast<std::int32_t>(n);
    args.k = static_cast<std::int32_t>(k);
    args.tile_n = tile_n;
    args.group_bands = group_bands;
    args.num_consumers = num_consumers;
    args.mover = static_cast<cpu::Mover>(mover);
    args.gemm = [type = scalar_type(dtype)](const cpu::GemmTile& tile) { torch_gemm(tile, type); };
    out_ = out;  // scale() reads the rows of local experts there
    py::gil_scoped_release release;
    const at::AutoDispatchBelowAutograd below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    rank_.combine(args);
  }

  void scale(const at::Tensor& weights, const at::Tensor& y) {
    demand_plan();
    check(weights, "weights", {tokens_, topk_}, at::kFloat);
    const cpu::DType dtype = dtype_of(y, "y");
    check(y, "y", {tokens_, width_of(out_row_bytes_, y)}, y.scalar_type());
    py::gil_scoped_release release;
    rank_.scale(weights.data_ptr<float>(), data(y), dtype);
  }

  void fail(const std::string& cause) { rank_.fail(cause); }
  std::string failure() const { return rank_.failure(); }

  std::vector<std::int64_t> expert_rows() const {
    demand_plan();
    const auto* first = rank_.plan().expert_row;
    return {first, first + local_experts_ + 1};
  }
  // Valid rows of each local expert.
  std::vector<std::int64_t> expert_valid() const {
    demand_plan();
    std::vector<std::int64_t> rows(local_experts_, 0);
    for (int b = 0; b < rank_.plan().sizes.bands; ++b) {
      rows[rank_.plan().bands[b].expert] += rank_.plan().bands[b].rows;
    }
    return rows;
  }
  PlanSizes plan_sizes() const { return rank_.plan().sizes; }
  tilemoe::IterationStats stats() const { return rank_.stats(); }
  void poison() { rank_.poison(); }
  void set_random_delays(std::int64_t max_us, std::uint64_t seed) {
    rank_.random_delay_us = max_us;
    rank_.random_delay_seed = seed;
  }

 private:
  // Before a rank is made of it.
  static cpu::RankConfig checked(const at::Tensor& region, cpu::RankConfig config) {
    const int world = config.heap.world;
    demand(
        world >= 1 && config.rank >= 0 && config.rank < world,
        "rank " + std::to_string(config.rank) + " is outside a world of " + std::to_string(world));
    demand(config.pids.empty() || config.pids.size() == static_cast<std::size_t>(world),
           "got " + std::to_string(config.pids.size()) + " pids, wanted none or one a rank, " +
               std::to_string(world));
    const cpu::HeapShape& heap = config.heap;
    demand(heap.max_experts >= 1 && heap.dispatch_bytes >= 0 && heap.recv_bytes >= 0,
           "max_experts must be at least 1, dispatch_bytes and recv_bytes at least 0");
    const auto needed = static_cast<std::int64_t>(cpu::heap_offsets(heap).block_bytes) * world;
    demand(region.is_contiguous() && region.scalar_type() == at::kByte && region.numel() >= needed,
           "region has " + std::to_string(region.numel()) + " bytes, wanted " +
               std::to_string(needed));
    return config;
  }

  at::Tensor region_;  // keeps the mapping alive
  at::Tensor out_;
  cpu::Rank rank_;
  std::string name_;
  void demand_plan() const { demand(has_plan_, "begin() has not succeeded in this call"); }

  bool has_plan_ = false;
  std::int64_t tokens_ = 0, topk_ = 0, in_row_bytes_ = 0, out_row_bytes_ = 0;
  int local_experts_ = 0;
};

// One plan, thrown away: for timing the planner and comparing it with the reference.
py::dict plan(const PlanParams& params, const at::Tensor& counts) {
  const std::int64_t experts = static_cast<std::int64_t>(params.world) * params.local_experts;
  check(counts, "counts", {params.world, experts}, at::kInt);
  const std::int32_t* c = counts.data_ptr<std::int32_t>();
  tilemoe::PlanView view{};
  view.sizes = tilemoe::plan_sizes(params, c);
  const auto longs = [](std::int64_t n) { return at::empty({n}, at::kLong); };
  const auto bytes = [](std::int64_t n, std::size_t each) {
    return at::empty({n, static_cast<std::int64_t>(each)}, at::kByte);
  };
  const at::Tensor expert_row = longs(params.local_experts + 1), run_row = longs(experts),
                   arrival_target = longs(params.world), dispatch_row = longs(experts),
                   recv_row = longs(experts + 1),
                   bands = bytes(view.sizes.bands, sizeof(tilemoe::Band)),
                   segments = bytes(view.sizes.segments, sizeof(tilemoe::Segment)),
                   chunks = bytes(view.sizes.chunks, sizeof(tilemoe::Chunk));
  view.expert_row = expert_row.data_ptr<std::int64_t>();
  view.run_row = run_row.data_ptr<std::int64_t>();
  view.arrival_target = arrival_target.data_ptr<std::int64_t>();
  view.dispatch_row = dispatch_row.data_ptr<std::int64_t>();
  view.recv_row = recv_row.data_ptr<std::int64_t>();
  view.bands = reinterpret_cast<tilemoe::Band*>(data(bands));
  view.segments = reinterpret_cast<tilemoe::Segment*>(data(segments));
  view.chunks = reinterpret_cast<tilemoe::Chunk*>(data(chunks));
  tilemoe::plan_fill(params, c, &view);
  py::dict out;
  out["expert_row"] = expert_row;
  out["run_row"] = run_row;
  out["arrival_target"] = arrival_target;
  out["dispatch_row"] = dispatch_row;
  out["recv_row"] = recv_row;
  out["bands"] = bands;
  out["segments"] = segments;
  out["chunks"] = chunks;
  return out;
}

py::tuple sizes_tuple(const PlanSizes& s) {
  return py::make_tuple(s.rows, s.valid_rows, s.bands, s.remote_bands, s.segments, s.chunks);
}

// Errors of the library are exceptions of ds_tilemoe.errors.
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const cpu::Error& error) {
    if (error.kind == cpu::ErrorKind::interrupted && PyErr_Occurred()) return;
    const char* name = error.kind == cpu::ErrorKind::rank_failure ? "RankFailure"
                       : error.kind == cpu::ErrorKind::capacity   ? "CapacityError"
                                                                  : "DeadlineError";
    PyErr_SetString(py::module_::import("ds_tilemoe.errors").attr(name).ptr(), error.what());
  }
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::register_exception_translator(translate);
  py::class_<PlanParams>(m, "PlanParams")
      .def(py::init([](int world, int rank, int local_experts, int tile_m, int layout,
                       int bands_per_segment, int local_tail_bands, int chunk_rows) {
             return PlanParams{world,
                               rank,
                               local_experts,
                               tile_m,
                               static_cast<tilemoe::Layout>(layout),
                               bands_per_segment,
                               local_tail_bands,
                               chunk_rows};
           }),
           py::kw_only(), py::arg("world"), py::arg("rank"), py::arg("local_experts"),
           py::arg("tile_m"), py::arg("layout"), py::arg("bands_per_segment"),
           py::arg("local_tail_bands"), py::arg("chunk_rows"));
  m.def("plan", &plan, "The combine plan as a dict of tensors (structs as rows of bytes).");
  m.def(
      "plan_bounds",
      [](const PlanParams& params, std::int64_t max_rows_in) {
        return sizes_tuple(tilemoe::plan_bounds(params, max_rows_in));
      },
      "Upper bounds of (rows, valid_rows, bands, remote_bands, segments, chunks).");
  m.def(
      "block_bytes",
      [](int world, int max_experts, std::int64_t dispatch_bytes, std::int64_t recv_bytes) {
        return cpu::heap_offsets({world, max_experts, dispatch_bytes, recv_bytes}).block_bytes;
      },
      "Bytes of one rank's block of the symmetric heap.");
  py::class_<Glance>(m, "Glance", py::custom_type_setup(&Glance::be_collected))
      .def(py::init<Glance::Objects, Glance::Tables, Glance::Tables, Glance::Tables,
                    Glance::Attributes>(),
           py::kw_only(), py::arg("modules"), py::arg("tables"), py::arg("parents"),
           py::arg("linears"), py::arg("attributes"))
      .def("holds", &Glance::holds, "Whether all is as it was when this was made.");
  py::class_<PyRank>(m, "Rank")
      .def(py::init<const at::Tensor&, int, int, int, std::int64_t, std::int64_t, std::int64_t,
                    double, double, std::vector<std::int64_t>>(),
           py::kw_only(), py::arg("region"), py::arg("rank"), py::arg("world"),
           py::arg("max_experts"), py::arg("dispatch_bytes"), py::arg("recv_bytes"),
           py::arg("max_tokens"), py::arg("wait_timeout_s"), py::arg("group_timeout_s"),
           py::arg("pids"))
      .def("begin", &PyRank::begin, py::kw_only(), py::arg("name"), py::arg("fingerprint"),
           py::arg("params"), py::arg("in_row_bytes"), py::arg("out_row_bytes"),
           py::arg("expert_ids"), py::arg("routing_error"))
      .def("dispatch", &PyRank::dispatch)
      .def("wait_expert", &PyRank::wait_expert)
      .def("dispatched", &PyRank::dispatched)
      .def("combine", &PyRank::combine, py::kw_only(), py::arg("hidden"), py::arg("out"),
           py::arg("weights"), py::arg("biases"), py::arg("tile_n"), py::arg("group_bands"),
           py::arg("num_consumers"), py::arg("mover"))
      .def("scale", &PyRank::scale)
      .def("fail", &PyRank::fail)
      .def("failure", &PyRank::failure)
      .def("expert_rows", &PyRank::expert_rows)
      .def("expert_valid", &PyRank::expert_valid)
      .def("plan_sizes", [](const PyRank& r) { return sizes_tuple(r.plan_sizes()); })
      .def("stats",
           [](const PyRank& r) {
             const tilemoe::IterationStats s = r.stats();
             return py::make_tuple(s.first_segment_ready, s.producer_end, s.last_put,
                                   s.last_arrival, s.segments, s.backlog_at_producer_end,
                                   s.chunks_drained, s.idle_spins, s.epoch);
           })
      .def("poison", &PyRank::poison)
      .def("set_random_delays", &PyRank::set_random_delays);
}

}  // namespace
