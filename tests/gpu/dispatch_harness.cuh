// Shared by the check and the bench of dispatch: a group of ranks in one process, one host thread a
// rank, each with what its count exchange and its GEMM 1 need (peer access instead of a symmetric
// heap).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "host.cuh"
#include "numbers.cuh"
#include "planner/exchange.h"
#include "planner/host_plan.h"
#include "producer/producer.h"

namespace front {

using namespace tilemoe;
using harness::cast;
using harness::gpus;
using harness::in_random_order;
using harness::list;
using harness::Meeting;
using harness::mix;

struct Shape {
  int world, local_experts, topk, n, k;  // of GEMM 1: x is [tokens, k], its output [rows, n]
  int max_tokens;
  ProducerKind kind{Dtype::bfloat16, 256, 0};
  Activation activation = Activation::none;
  Layout layout = Layout::compact;
  int local_tail_bands = -1;
  int64_t max_rows = 0;  // that a rank may get; 0 = what max_tokens allows

  int experts() const { return world * local_experts; }
  int matrices() const { return kind.gated != 0 ? 2 * local_experts : local_experts; }
  PlanParams plan(int rank) const {
    return {world, rank, local_experts, kProducerTileM, layout, 1, local_tail_bands, 64};
  }
};

template <class T>
T* upload(const std::vector<T>& values) {
  T* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, (values.size() + 1) * sizeof(T)));
  CHECK_CUDA(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

// One rank's routes of a call, as a router leaves them.
struct Routing {
  int tokens = 0;
  std::vector<int32_t> counts, sources;  // [E]; token of each kept route by (expert, token, k)
  int32_t *counts_d = nullptr, *sources_d = nullptr;
};

// `shares`: how likely each expert is; empty = every expert as often as the others (to within one
// when tokens * topk allows). `dropped`: share of routes that are dropped.
inline Routing make_routing(const Shape& shape, int tokens, const std::vector<double>& shares,
                            double dropped, std::mt19937_64& random) {
  Routing r;
  r.tokens = tokens;
  const int experts = shape.experts(), topk = shape.topk;
  std::vector<std::vector<int32_t>> rows(experts);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  std::discrete_distribution<int> draw(shares.begin(), shares.end());
  std::vector<int> turn(tokens);
  std::iota(turn.begin(), turn.end(), 0);
  std::shuffle(turn.begin(), turn.end(), random);
  const int stride = std::max(1, experts / topk);
  for (int t = 0; t < tokens; ++t) {
    std::vector<int> taken;
    for (int k = 0; k < topk; ++k) {
      int expert = shares.empty() ? (turn[t] + k * stride) % experts : draw(random);
      while (std::find(taken.begin(), taken.end(), expert) != taken.end()) {
        expert = (expert + 1) % experts;
      }
      taken.push_back(expert);
      if (uniform(random) >= dropped) rows[expert].push_back(t);
    }
  }
  for (const auto& of_expert : rows) {
    r.counts.push_back(static_cast<int32_t>(of_expert.size()));
    r.sources.insert(r.sources.end(), of_expert.begin(), of_expert.end());
  }
  r.counts_d = upload(r.counts);
  r.sources_d = upload(r.sources);
  return r;
}

// Where a valid row of a layout comes from.
struct Origin {
  int32_t row;
  int32_t owner;
  int32_t token;
  int32_t expert;  // global
};

// Of the layout of `rank`, from the host's planner and all ranks' routes.
inline std::vector<Origin> origins(const Shape& shape, int rank,
                                   const std::vector<const Routing*>& routings) {
  const PlanParams params = shape.plan(rank);
  const int world = shape.world, experts = shape.experts();
  std::vector<int32_t> counts;
  for (const Routing* r : routings) counts.insert(counts.end(), r->counts.begin(), r->counts.end());
  const HostPlan plan(params, counts.data());
  std::vector<Origin> result;
  for (int owner = 0; owner < world; ++owner) {
    const Routing& r = *routings[owner];
    size_t source = 0;
    for (int expert = 0; expert < experts; ++expert) {
      for (int i = 0; i < r.counts[expert]; ++i, ++source) {
        const int local = expert - rank * shape.local_experts;
        if (local < 0 || local >= shape.local_experts) continue;
        result.push_back({static_cast<int32_t>(plan.run_row[local * world + owner] + i), owner,
                          r.sources[source], expert});
      }
    }
  }
  return result;
}

// Routes of all ranks for one call.
struct Call {
  std::vector<Routing> routings;
  std::vector<std::vector<Origin>> rows;  // of each rank's layout
  std::vector<Origin*> rows_d;            // on its device
};

// One rank: its device, memory, stream and the params of its kernels.
struct Rank {
  int rank = 0, device = 0, sms = 0;
  cudaStream_t main = nullptr;
  std::byte *block = nullptr, *state = nullptr;
  ErrorRecord* error = nullptr;  // page-locked
  RankView view{};
  PlanSizes bounds{};
  ExchangeParams exchange{};
  ProducerParams gemm{};
  uint16_t *x = nullptr, *rows = nullptr, *d = nullptr;  // rows: the dispatch room
  std::vector<void*> b;
  int32_t* nothing = nullptr;  // device, 0: a band count

  void use() const { CHECK_CUDA(cudaSetDevice(device)); }
};

class Group {
 public:
  explicit Group(const Shape& shape) : shape_(shape) {
    const int devices = gpus();
    ranks_.resize(shape.world);
    const int64_t rows_in = shape.max_rows > 0 ? shape.max_rows
                                               : int64_t{shape.world} * shape.max_tokens *
                                                     std::min(shape.topk, shape.local_experts);
    const PlanSizes bounds = plan_bounds(shape.plan(0), rows_in);
    const int64_t layout_rows = std::max<int64_t>(bounds.rows, kProducerTileM);
    offsets_ = block_offsets({shape.world, shape.experts(),
                              static_cast<int32_t>(layout_rows / kProducerTileM), 0,
                              layout_rows * shape.k * 2});
    std::vector<std::byte*> blocks;
    for (int r = 0; r < shape.world; ++r) {
      Rank& rank = ranks_[r];
      rank.rank = r;
      rank.device = r % devices;
      rank.bounds = bounds;
      rank.bounds.rows = layout_rows;
      rank.use();
      for (int peer = 0; peer < devices; ++peer) {
        static bool enabled[64][64] = {};
        if (peer == rank.device || enabled[rank.device][peer]) continue;
        enabled[rank.device][peer] = true;
        CHECK_CUDA(cudaDeviceEnablePeerAccess(peer, 0));
      }
      CHECK_CUDA(tilemoe_exchange_load());
      CHECK_CUDA(tilemoe_producer_load());
      CHECK_CUDA(cudaDeviceGetAttribute(&rank.sms, cudaDevAttrMultiProcessorCount, rank.device));
      rank.block = alloc<std::byte>(offsets_.block_bytes);
      blocks.push_back(rank.block);
    }
    for (Rank& rank : ranks_) set_up(rank, blocks);
    reset();
  }
  ~Group() {
    for (const auto& [device, pointer] : memory_) {
      cudaSetDevice(device);
      cudaFree(pointer);
    }
    for (Rank& rank : ranks_) {
      rank.use();
      cudaStreamDestroy(rank.main);
      cudaFreeHost(rank.error);
    }
  }
  Group(const Group&) = delete;

  Rank& operator[](int rank) { return ranks_[rank]; }
  const Shape& shape() const { return shape_; }

  // As a new heap: control words zero on all ranks, before any call.
  void reset() {
    for (Rank& rank : ranks_) {
      rank.use();
      CHECK_CUDA(cudaDeviceSynchronize());
      CHECK_CUDA(cudaMemset(rank.block, 0, offsets_.recv));
      CHECK_CUDA(cudaMemset(rank.state, 0, state_bytes(rank.bounds.bands)));
      CHECK_CUDA(cudaDeviceSynchronize());
      *rank.error = {};
    }
  }

  // One host thread a rank.
  void each(const std::function<void(Rank&)>& work) {
    std::vector<std::thread> threads;
    for (Rank& rank : ranks_) {
      threads.emplace_back([&work, &rank] {
        rank.use();
        work(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // shares, tokens and dropped of each rank, in turn.
  Call make_call(const std::function<Routing(int rank)>& make) {
    Call call;
    std::vector<const Routing*> all;
    for (Rank& rank : ranks_) {
      rank.use();
      call.routings.push_back(make(rank.rank));
    }
    for (const Routing& routing : call.routings) all.push_back(&routing);
    for (Rank& rank : ranks_) {
      rank.use();
      call.rows.push_back(origins(shape_, rank.rank, all));
      call.rows_d.push_back(upload(call.rows.back()));
    }
    return call;
  }
  void free_call(Call& call) {
    for (int r = 0; r < shape_.world; ++r) {
      ranks_[r].use();
      cudaFree(call.routings[r].counts_d);
      cudaFree(call.routings[r].sources_d);
      cudaFree(call.rows_d[r]);
    }
  }

  static void change_view(Rank& rank, const std::function<void(RankView&)>& change) {
    for (RankView* view : {&rank.view, &rank.exchange.view, &rank.gemm.dispatch.view}) {
      change(*view);
    }
  }
  void launch_exchange(Rank& rank, const Routing& routing) {
    ExchangeParams p = rank.exchange;
    p.own_counts = routing.counts_d;
    p.tokens = routing.tokens;
    CHECK_CUDA(tilemoe_exchange_launch(&p, rank.main));
  }
  // What of GEMM 1's kernel is launched: dispatch and tiles, or one of them. With tiles only, the
  // rows are there already.
  enum Work { kBoth, kDispatch, kTiles };
  ProducerParams gemm_params(const Rank& rank, const Routing& routing, int num_dispatch_ctas,
                             int grid, Work work) const {
    ProducerParams p = rank.gemm;
    p.dispatch.sources = routing.sources_d;
    p.dispatch.num_dispatch_ctas = num_dispatch_ctas;
    p.group_bands = tilemoe_producer_group_bands(shape_.kind, shape_.n, grid);
    if (work == kTiles) p.dispatch.view.state = nullptr;
    if (work == kDispatch) p.band_count = rank.nothing;
    return p;
  }
  void launch_gemm(Rank& rank, const Routing& routing, int num_dispatch_ctas, int grid,
                   Work work = kBoth) {
    const ProducerParams p = gemm_params(rank, routing, num_dispatch_ctas, grid, work);
    CHECK_CUDA(tilemoe_producer_launch(&p, shape_.kind, grid, rank.main));
  }
  // NaN in every row of the room and of the output. Before the exchange, by the reuse rule.
  void poison(Rank& rank) {
    CHECK_CUDA(cudaMemsetAsync(rank.rows, 0xff, rank.bounds.rows * shape_.k * 2, rank.main));
    CHECK_CUDA(cudaMemsetAsync(rank.d, 0xff, rank.bounds.rows * shape_.n * 2, rank.main));
  }
  ErrorRecord failure(Rank& rank) {
    rank.use();
    CHECK_CUDA(cudaDeviceSynchronize());
    Failure failure;
    CHECK_CUDA(cudaMemcpy(&failure, rank.block, sizeof(failure), cudaMemcpyDeviceToHost));
    return failure.code != 0 ? failure.record : *rank.error;
  }

 private:
  template <class T>
  T* alloc(int64_t count) {
    T* pointer = nullptr;
    int device = 0;
    CHECK_CUDA(cudaGetDevice(&device));
    CHECK_CUDA(cudaMalloc(&pointer, std::max<int64_t>(count, 1) * sizeof(T)));
    memory_.push_back({device, pointer});
    return pointer;
  }
  template <class T>
  T* put(const std::vector<T>& values) {
    T* const device = alloc<T>(values.size());
    CHECK_CUDA(
        cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
  }

  void set_up(Rank& rank, const std::vector<std::byte*>& blocks) {
    rank.use();
    CHECK_CUDA(cudaStreamCreateWithFlags(&rank.main, cudaStreamNonBlocking));
    CHECK_CUDA(cudaHostAlloc(&rank.error, sizeof(ErrorRecord), cudaHostAllocPortable));
    const PlanSizes& bounds = rank.bounds;
    const int64_t experts = shape_.experts();
    rank.state = alloc<std::byte>(state_bytes(bounds.bands));
    rank.view = {shape_.world,
                 rank.rank,
                 offsets_,
                 put(blocks),
                 rank.state,
                 half_bytes(bounds.bands),
                 int64_t{20} * 1000 * 1000 * 1000,
                 rank.error,
                 0};
    PlanKernelParams& p = rank.exchange.plan;
    p.params = shape_.plan(rank.rank);
    p.capacity = {bounds.rows, bounds.bands, bounds.segments, bounds.chunks};
    p.view.expert_row = alloc<int64_t>(shape_.local_experts + 1);
    p.view.run_row = alloc<int64_t>(experts);
    p.view.bands = alloc<Band>(bounds.bands);
    p.view.segments = alloc<Segment>(bounds.segments);
    p.view.chunks = alloc<Chunk>(bounds.chunks);
    p.view.arrival_target = alloc<int64_t>(shape_.world);
    p.view.dispatch_row = alloc<int64_t>(experts);
    p.view.recv_row = alloc<int64_t>(experts + 1);
    p.front_bands = alloc<int32_t>(bounds.bands);
    p.counts = alloc<int32_t>(shape_.world * experts);
    rank.exchange.view = rank.view;
    rank.exchange.layer = 7;
    rank.exchange.max_tokens = shape_.max_tokens;
    rank.exchange.group_timeout_ns = rank.view.wait_timeout_ns;

    rank.rows = reinterpret_cast<uint16_t*>(rank.block + offsets_.dispatch);
    rank.x = alloc<uint16_t>(int64_t{shape_.max_tokens} * shape_.k);
    rank.d = alloc<uint16_t>(bounds.rows * shape_.n);
    rank.nothing = put(std::vector<int32_t>{0});
    const Dtype dtype = shape_.kind.dtype;
    std::vector<TensorMap> maps(shape_.matrices());
    for (TensorMap& map : maps) {
      rank.b.push_back(alloc<uint16_t>(int64_t{shape_.n} * shape_.k));
      CHECK_CUDA(tilemoe_make_tensor_map(&map, rank.b.back(), dtype, shape_.n, shape_.k,
                                         tilemoe_producer_b_box_rows(shape_.kind)));
    }
    ProducerParams& g = rank.gemm;
    CHECK_CUDA(
        tilemoe_make_tensor_map(&g.a, rank.rows, dtype, bounds.rows, shape_.k, kProducerTileM));
    CHECK_CUDA(tilemoe_make_tensor_map(&g.a_few, rank.rows, dtype, bounds.rows, shape_.k,
                                       kProducerFewRows));
    CHECK_CUDA(
        tilemoe_make_tensor_map(&g.d, rank.d, dtype, bounds.rows, shape_.n, kProducerStoreRows));
    CHECK_CUDA(
        tilemoe_make_tensor_map(&g.d_few, rank.d, dtype, bounds.rows, shape_.n, kProducerFewRows));
    g.b = put(maps);
    g.bands = p.view.bands;
    g.front_bands = p.front_bands;
    g.experts = shape_.local_experts;
    g.n = shape_.n;
    g.k = shape_.k;
    g.activation = shape_.activation;
    g.ship.view = rank.view;
    tilemoe_set_counters(&g, 1);
    g.ship.view.state = nullptr;
    g.dispatch.view = rank.view;
    g.dispatch.x = rank.x;
    g.dispatch.dispatch_row = p.view.dispatch_row;
    g.dispatch.recv_row = p.view.recv_row;
    g.dispatch.row_bytes = int64_t{shape_.k} * 2;
    g.dispatch.local_experts = shape_.local_experts;
  }

  Shape shape_;
  BlockOffsets offsets_{};
  std::vector<Rank> ranks_;
  std::vector<std::pair<int, void*>> memory_;
};

}  // namespace front
