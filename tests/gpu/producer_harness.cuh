// Shared by the producer's check and its bench: one problem with its bands, maps and counters.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "host.cuh"
#include "producer/instances.h"

namespace harness {

using namespace tilemoe;

template <class T>
T* to_device(const std::vector<T>& values) {
  T* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, (values.size() + 1) * sizeof(T)));
  CHECK_CUDA(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

// Experts one after another, each at a multiple of tile_m, bands in that order.
struct Problem {
  ProducerKind kind;
  ProducerParams params;
  std::vector<Band> bands;
  std::vector<int64_t> first_row;  // of each expert; then the layout's rows
  int32_t n_tiles;
  int64_t layout_rows;
  int32_t sets;      // counter sets: a launch uses one and leaves it dirty
  size_t set_words;  // one claim word, then the band flags
  uint32_t* counters;
  uint64_t* times;  // [sets, 2] start and end

  static std::vector<int64_t> layout(const std::vector<int>& rows) {
    std::vector<int64_t> first{0};
    for (int r : rows) {
      const int64_t padded = (r + kProducerTileM - 1) / kProducerTileM * kProducerTileM;
      first.push_back(first.back() + padded);
    }
    return first;
  }

  // b and bias: host arrays of device pointers; gated kinds list all gates, then all ups.
  Problem(ProducerKind kind_, const std::vector<int>& rows, int n, int k, const void* a,
          const void* const* b, const void* const* bias, void* d, Activation activation,
          int group_bands, int sets_)
      : kind(kind_), params{}, first_row(layout(rows)), sets(sets_) {
    const int experts = static_cast<int>(rows.size());
    const int matrices = kind.gated != 0 ? 2 * experts : experts;
    layout_rows = first_row.back();
    for (int e = 0; e < experts; ++e) {
      for (int r = 0; r < rows[e]; r += kProducerTileM) {
        const int left = rows[e] - r;
        bands.push_back({first_row[e] + r, e, left < kProducerTileM ? left : kProducerTileM});
      }
    }
    const int out_n = kind.gated != 0 ? kind.tile_n / 2 : kind.tile_n;
    n_tiles = (n + out_n - 1) / out_n;
    CHECK_CUDA(tilemoe_make_tensor_map(&params.a, a, kind.dtype, layout_rows, k, kProducerTileM));
    CHECK_CUDA(
        tilemoe_make_tensor_map(&params.a_few, a, kind.dtype, layout_rows, k, kProducerFewRows));
    CHECK_CUDA(
        tilemoe_make_tensor_map(&params.d, d, kind.dtype, layout_rows, n, kProducerStoreRows));
    CHECK_CUDA(
        tilemoe_make_tensor_map(&params.d_few, d, kind.dtype, layout_rows, n, kProducerFewRows));
    std::vector<TensorMap> maps(matrices);
    for (int i = 0; i < matrices; ++i) {
      CHECK_CUDA(tilemoe_make_tensor_map(&maps[i], b[i], kind.dtype, n, k,
                                         tilemoe_producer_b_box_rows(kind)));
    }
    params.b = to_device(maps);
    params.bias =
        bias == nullptr ? nullptr : to_device(std::vector<const void*>(bias, bias + matrices));
    params.bands = to_device(bands);
    params.band_count = to_device(std::vector<int32_t>{static_cast<int32_t>(bands.size())});
    params.experts = experts;
    params.n = n;
    params.k = k;
    params.group_bands = group_bands;
    params.activation = activation;
    set_words = 1 + bands.size();
    CHECK_CUDA(cudaMalloc(&counters, sets * set_words * sizeof(uint32_t)));
    CHECK_CUDA(cudaMalloc(&times, sets * 2 * sizeof(uint64_t)));
    reset(nullptr);
  }

  void reset(cudaStream_t stream) {
    CHECK_CUDA(cudaMemsetAsync(counters, 0, sets * set_words * sizeof(uint32_t), stream));
    CHECK_CUDA(cudaMemsetAsync(times, 0, sets * 2 * sizeof(uint64_t), stream));
  }

  ProducerParams params_of(int set, bool flags) const {
    ProducerParams p = params;
    p.tile_claim = counters + set * set_words;
    p.band_flags = flags ? p.tile_claim + 1 : nullptr;
    p.start_ns = times + 2 * set;
    p.end_ns = times + 2 * set + 1;
    return p;
  }

  cudaError_t run(int set, bool flags, int grid, cudaStream_t stream) const {
    const ProducerParams p = params_of(set, flags);
    return tilemoe_producer_launch(&p, kind, grid, stream);
  }

  ~Problem() {
    for (const void* p :
         {static_cast<const void*>(params.b), static_cast<const void*>(params.bias),
          static_cast<const void*>(params.bands), static_cast<const void*>(params.band_count),
          static_cast<const void*>(counters), static_cast<const void*>(times)}) {
      cudaFree(const_cast<void*>(p));
    }
  }
  Problem(const Problem&) = delete;
};

}  // namespace harness
