#include "../common/launch.cuh"
#include "../common/pairs.cuh"
#include "../common/wait.cuh"
#include "../common/warp.cuh"
#include "scale.h"

namespace tilemoe::scale {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kCtasPerSm = 2;  // more would spill
constexpr int kRowsAtOnce = 2;
constexpr int kVectors = 4;  // of 16 bytes that a lane has of each row of a slice
constexpr int kSliceColumns = 32 * 8 * kVectors;

// All threads of a CTA: true once every row that this rank needs is here.
__device__ bool await_rows(const ScaleParams& p, uint64_t epoch) {
  const RankView& view = p.view;
  bool good = state_of(view).outcome == Outcome::ok;
  const int32_t source = threadIdx.x;
  if (good && source < view.world) {
    random_delay(view);
    uint64_t polls = 0;
    const uint64_t* const word = arrival_word(view, view.rank, epoch, source);
    const uint64_t owed = p.arrival_target[source];
    good = wait_equal(view, view.wait_timeout_ns, owed, Wait::arrivals, source, -1, epoch, &polls,
                      [&] {
                        const uint64_t rows = read_system(word);
                        return kFault == Fault::early_arrival && rows > 0 ? owed : rows;
                      });
  }
  await_prerequisites();  // local experts' rows
  // A rank that fails in front of its GEMM 2 says so before it sends what that made of it, and this
  // rank itself before its producer: so behind the wait each thread sees the failures that could
  // have spoilt the rows it waited for.
  if (good && source < view.world) good = !group_failed(view);
  return __syncthreads_and(good);
}

// All threads: in the CTA that finishes last the number of CTAs that went without their rows, else
// -1. What the others have written is in front of it, for a thread that fences behind it.
__device__ int32_t finish(Half& half, bool good) {
  constexpr uint32_t kWithout = 1 << 16;
  __shared__ uint32_t before;
  const uint32_t own = good ? 1 : 1 + kWithout;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_gpu();
    before = add_and_read_count(&half.scale_finished, own);
  }
  __syncthreads();
  const uint32_t all = before + own;
  return all % kWithout == gridDim.x ? static_cast<int32_t>(all / kWithout) : -1;
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
          const float2 pair = unpack(E{}, pairs[i]);
          sums[v][2 * i] = __fadd_rn(sums[v][2 * i], __fmul_rn(w, pair.x));
          sums[v][2 * i + 1] = __fadd_rn(sums[v][2 * i + 1], __fmul_rn(w, pair.y));
        }
      }
    }
  }
}

// All warps, an item = a slice of a token at a time. Where the rows of the item after next and of
// the next one lie is on its way while an item is summed.
template <class E>
__device__ void sum_tokens(const ScaleParams& p) {
  const int lane = threadIdx.x % 32;
  const int32_t slices = ceil_div(p.n, kSliceColumns);
  const int32_t items = p.tokens * slices;
  const int32_t warps = static_cast<int32_t>(gridDim.x) * kWarps;
  const int32_t row_vectors = p.n / 8;
  const std::byte* const recv = p.view.blocks[p.view.rank] + p.view.offsets.recv;
  int32_t item = static_cast<int32_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
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
      y[column + 32 * v] = {pack(E{}, sums[v][0], sums[v][1]), pack(E{}, sums[v][2], sums[v][3]),
                            pack(E{}, sums[v][4], sums[v][5]), pack(E{}, sums[v][6], sums[v][7])};
    }
  }
}

// All threads of CTA `cta` of `ctas`.
template <class E>
__device__ void fill_nan(const ScaleParams& p, int32_t cta, int32_t ctas) {
  const uint32_t nan = pack(E{}, __int_as_float(0x7fc00000), __int_as_float(0x7fc00000));
  const int64_t vectors = int64_t{p.tokens} * (p.n / 8);
  for (int64_t i = int64_t{cta} * kThreads + threadIdx.x; i < vectors;
       i += int64_t{ctas} * kThreads) {
    static_cast<uint4*>(p.y)[i] = {nan, nan, nan, nan};
  }
}

template <class E>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    scale_kernel(const __grid_constant__ ScaleParams p) {
  const uint64_t epoch = state_of(p.view).epoch;
  Half& half = half_at(p.view, epoch);
  const int32_t cta = static_cast<int32_t>(blockIdx.x);
  const int32_t ctas = static_cast<int32_t>(gridDim.x);
  const bool good = await_rows(p, epoch);
  if (cta == 0 && threadIdx.x == 0) half.last_arrival_ns = now_ns();
  if (good) {
    sum_tokens<E>(p);
  } else {
    fill_nan<E>(p, cta, ctas);
  }
  const int32_t without = finish(half, good);
  if (without < 0) return;
  if (without > 0) {
    // Some CTAs may have looked before the group failed, and have summed: no output is NaN in part.
    if (threadIdx.x == 0) fence_gpu();
    __syncthreads();
    if (without < ctas) fill_nan<E>(p, 0, 1);
    if (threadIdx.x == 0 && group_failed(p.view)) {
      tell_host(p.view, failure_of(p.view, p.view.rank).record);
    }
  }
  if (threadIdx.x != 0) return;
  if (p.uncounted != 0) half.backlog = 0;
  half.scale_end_ns = now_ns();
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
  const int64_t items = int64_t{params->tokens} * ceil_div(params->n, scale::kSliceColumns);
  if (items > INT32_MAX - (1 << 20)) return cudaErrorInvalidValue;  // room for strides
  // All GPUs of a process are alike: the first device asked speaks for all.
  static const scale::Device device = [] {
    scale::Device found;
    if (scale::look_at(&found) != cudaSuccess) found.sms = 0;
    return found;
  }();
  if (device.sms == 0) return cudaErrorInitializationError;
  const bool bf16 = params->dtype == Dtype::bfloat16;
  int64_t ctas = ceil_div(items, scale::kWarps);
  const int64_t fit = int64_t{device.sms} * device.ctas_per_sm[bf16 ? 0 : 1];
  const int64_t most = params->max_ctas > 0 && params->max_ctas < fit ? params->max_ctas : fit;
  if (ctas > most) ctas = most;
  if (ctas < 1) ctas = 1;
  const auto kernel = bf16 ? scale::scale_kernel<__nv_bfloat16> : scale::scale_kernel<__half>;
  return launch(kernel, ctas, scale::kThreads, 0, stream, true, *params);
}
