#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/wait.cuh"
#include "scale.h"

namespace tilemoe::scale {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kCtasPerSm = 2;  // more would spill
constexpr int kRowsAtOnce = 2;
constexpr int kVectors = 4;  // of 16 bytes that a lane has of each row of a slice
constexpr int kSliceColumns = 32 * 8 * kVectors;
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ float2 to_floats(__nv_bfloat16, uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}
__device__ __forceinline__ float2 to_floats(__half, uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
__device__ __forceinline__ uint32_t to_pair(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t to_pair(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// All threads of a CTA: true once every row that this rank needs is here.
__device__ bool await_rows(const ScaleParams& p, uint64_t epoch) {
  const RankView& view = p.view;
  bool good = state_of(view).outcome == Outcome::ok;
  const int32_t source = threadIdx.x;
  if (good && source < view.world) {
    random_delay(view);
    uint64_t polls = 0;
    const uint64_t* const word = arrival_word(view, view.rank, epoch, source);
    good = wait_equal(view, view.wait_timeout_ns, p.arrival_target[source], Wait::arrivals, source,
                      -1, epoch, &polls, [&] { return read_system(word); });
  }
  await_prerequisites();  // local experts' rows
  // A rank whose own rows all came must not go on alone when its peers have given up.
  if (good && source == view.rank && group_failed(view)) good = false;
  return __syncthreads_and(good);
}

// One thread, when the rank's own rows are all shipped: its consumer may still be at that.
__device__ void write_stats(const ScaleParams& p, uint64_t epoch, uint64_t arrival_ns) {
  const State& state = state_of(p.view);
  const Half& half = half_at(p.view, epoch);
  const uint64_t begin = now_ns();
  while (read_count(&half.chunks_shipped) != uint32_t(state.chunks) &&
         now_ns() - begin < static_cast<uint64_t>(p.view.wait_timeout_ns) &&
         !group_failed(p.view)) {
  }
  fence_gpu();
  const volatile Half& seen = half;
  const uint64_t start = seen.start_ns;
  const auto since_start = [&](uint64_t time) {
    return time == 0 || start == 0 ? int64_t{0} : static_cast<int64_t>(time - start);
  };
  *p.stats = {since_start(seen.first_ready_ns),
              since_start(seen.end_ns),
              since_start(seen.last_put_ns),
              since_start(arrival_ns),
              state.segments,
              seen.backlog,
              seen.chunks_drained,
              static_cast<int64_t>(seen.idle_spins),
              static_cast<int64_t>(epoch)};
}

// A lane's route of a token, and where the run begins that holds its row.
struct Route {
  int32_t expert = -1;
  int32_t position;
  float weight;
};
struct Place {
  Route route;
  bool here;  // the expert is local
  int64_t first_row;
};

__device__ __forceinline__ Route load_route(const ScaleParams& p, int32_t token, int32_t k) {
  Route route;
  if (token < p.tokens && k < p.topk) {
    const int64_t at = static_cast<int64_t>(token) * p.topk + k;
    route = {p.expert_ids[at], p.positions[at], p.weights[at]};
  }
  return route;
}

__device__ __forceinline__ Place find_run(const ScaleParams& p, const Route& route) {
  const int32_t local = route.expert - p.view.rank * p.local_experts;
  Place place{route, local >= 0 && local < p.local_experts, 0};
  if (route.expert >= 0) {
    place.first_row =
        place.here ? p.run_row[local * p.view.world + p.view.rank] : p.recv_row[route.expert];
  }
  return place;
}

__device__ __forceinline__ const uint4* row_at(const ScaleParams& p, const std::byte* recv,
                                               const Place& place) {
  if (place.route.expert < 0) return nullptr;
  const std::byte* const base = place.here ? static_cast<const std::byte*>(p.rows) : recv;
  return reinterpret_cast<const uint4*>(base + (place.first_row + place.route.position) *
                                                   (int64_t{p.n} * 2));
}

using Sums = float[kVectors][8];

// One warp: adds the rows of up to 32 routes, one a lane, to a slice of their token's columns.
template <class E>
__device__ __forceinline__ void add_rows(Sums& sums, const uint4* row, float weight, int32_t count,
                                         int32_t column, int32_t row_vectors) {
  for (int32_t k = 0; k < count; k += kRowsAtOnce) {
    uint4 values[kRowsAtOnce][kVectors];
    const uint4* from[kRowsAtOnce];
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      const uint64_t address = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(row), k + j);
      from[j] = k + j < count ? reinterpret_cast<const uint4*>(address) : nullptr;
      __builtin_assume(from[j] == nullptr || __isGlobal(from[j]));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (from[j] != nullptr && column + 32 * v < row_vectors) {
          values[j][v] = from[j][column + 32 * v];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      const float w = __shfl_sync(kAllLanes, weight, k + j);
      if (from[j] == nullptr) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t pairs[4] = {values[j][v].x, values[j][v].y, values[j][v].z, values[j][v].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = to_floats(E{}, pairs[i]);
          sums[v][2 * i] = __fadd_rn(sums[v][2 * i], __fmul_rn(w, pair.x));
          sums[v][2 * i + 1] = __fadd_rn(sums[v][2 * i + 1], __fmul_rn(w, pair.y));
        }
      }
    }
  }
}

// All warps of the grid, an item = a slice of a token at a time. Where the rows of the item after
// next and of the next one lie is on its way while an item is summed.
template <class E>
__device__ void sum_tokens(const ScaleParams& p) {
  const int lane = threadIdx.x % 32;
  const int32_t slices = (p.n + kSliceColumns - 1) / kSliceColumns;
  const int32_t items = p.tokens * slices;
  const int32_t warps = gridDim.x * kWarps;
  const int32_t row_vectors = p.n / 8;
  const std::byte* const recv = p.view.blocks[p.view.rank] + p.view.offsets.recv;
  int32_t item = blockIdx.x * kWarps + threadIdx.x / 32;
  Place next = find_run(p, load_route(p, item / slices, lane));
  Route after = load_route(p, (item + warps) / slices, lane);
  for (; item < items; item += warps) {
    const Place place = next;
    next = find_run(p, after);
    after = load_route(p, (item + 2 * warps) / slices, lane);
    const int32_t token = item / slices;
    const int32_t column = (item - token * slices) * (kSliceColumns / 8) + lane;
    Sums sums = {};
    add_rows<E>(sums, row_at(p, recv, place), place.route.weight, min(p.topk, 32), column,
                row_vectors);
    for (int32_t first = 32; first < p.topk; first += 32) {
      const Place more = find_run(p, load_route(p, token, first + lane));
      add_rows<E>(sums, row_at(p, recv, more), more.route.weight, min(p.topk - first, 32), column,
                  row_vectors);
    }
    uint4* const y = static_cast<uint4*>(p.y) + static_cast<int64_t>(token) * row_vectors;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column + 32 * v >= row_vectors) continue;
      y[column + 32 * v] = {
          to_pair(E{}, sums[v][0], sums[v][1]), to_pair(E{}, sums[v][2], sums[v][3]),
          to_pair(E{}, sums[v][4], sums[v][5]), to_pair(E{}, sums[v][6], sums[v][7])};
    }
  }
}

template <class E>
__device__ void fill_nan(const ScaleParams& p) {
  const uint32_t nan = to_pair(E{}, __int_as_float(0x7fc00000), __int_as_float(0x7fc00000));
  const int64_t vectors = int64_t{p.tokens} * (p.n / 8);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < vectors;
       i += int64_t{gridDim.x} * kThreads) {
    static_cast<uint4*>(p.y)[i] = {nan, nan, nan, nan};
  }
}

template <class E>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    scale_kernel(const __grid_constant__ ScaleParams p) {
  const uint64_t epoch = state_of(p.view).epoch;
  const bool good = await_rows(p, epoch);
  const uint64_t arrival_ns = now_ns();
  if (good) {
    sum_tokens<E>(p);
  } else {
    fill_nan<E>(p);
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  if (group_failed(p.view)) tell_host(p.view, failure_of(p.view, p.view.rank).record);
  if (p.stats != nullptr) write_stats(p, epoch, arrival_ns);
}

struct Device {
  int sms = 0;
  int ctas_per_sm[2] = {};  // by Dtype
};

cudaError_t look_at(Device* device) {
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->sms, cudaDevAttrMultiProcessorCount, id);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&device->ctas_per_sm[0],
                                                          scale_kernel<__nv_bfloat16>, kThreads, 0);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&device->ctas_per_sm[1],
                                                          scale_kernel<__half>, kThreads, 0);
  }
  return error;
}

}  // namespace
}  // namespace tilemoe::scale

cudaError_t tilemoe_scale_load() {
  tilemoe::scale::Device device;
  return tilemoe::scale::look_at(&device);
}

cudaError_t tilemoe_scale_launch(const tilemoe::ScaleParams* params, cudaStream_t stream) {
  using namespace tilemoe;
  if (params == nullptr || params->n < 8 || params->n % 8 != 0 || params->topk < 1 ||
      params->tokens < 0 || params->view.world < 1 || params->view.world > kMaxWorld ||
      params->local_experts < 1) {
    return cudaErrorInvalidValue;
  }
  const int64_t items =
      int64_t{params->tokens} * ((params->n + scale::kSliceColumns - 1) / scale::kSliceColumns);
  if (items > INT32_MAX - (1 << 20)) return cudaErrorInvalidValue;  // room for strides
  // All GPUs of a process are alike: the first device asked speaks for all.
  static const scale::Device device = [] {
    scale::Device found;
    if (scale::look_at(&found) != cudaSuccess) found.sms = 0;
    return found;
  }();
  if (device.sms == 0) return cudaErrorInitializationError;
  const bool bf16 = params->dtype == Dtype::bfloat16;
  int64_t ctas = (items + scale::kWarps - 1) / scale::kWarps;
  const int64_t fit = int64_t{device.sms} * device.ctas_per_sm[bf16 ? 0 : 1];
  const int64_t most = params->max_ctas > 0 && params->max_ctas < fit ? params->max_ctas : fit;
  if (ctas > most) ctas = most;
  if (ctas < 1) ctas = 1;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(scale::kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return bf16 ? cudaLaunchKernelEx(&config, scale::scale_kernel<__nv_bfloat16>, *params)
              : cudaLaunchKernelEx(&config, scale::scale_kernel<__half>, *params);
}
