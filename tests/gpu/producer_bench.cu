// The producer as a library for bench_producer.py: problems are built once, runs only launch.
#include "producer_harness.cuh"

using harness::Problem;

extern "C" {

// bias may be null. Counter sets: one a run, all zeroed by bench_reset.
void* bench_create(int dtype, int tile_n, int gated, int experts, const int* rows, int n, int k,
                   const void* a, const void* const* b, const void* const* bias, void* d,
                   int activation, int group_bands, int sets) {
  if (tilemoe_producer_load() != cudaSuccess) return nullptr;
  return new Problem({static_cast<tilemoe::Dtype>(dtype), tile_n, gated},
                     std::vector<int>(rows, rows + experts), n, k, a, b, bias, d,
                     static_cast<tilemoe::Activation>(activation), group_bands, sets);
}

int bench_group_bands(int tile_n, int gated, int n, int grid) {
  return tilemoe_producer_group_bands({tilemoe::Dtype::bfloat16, tile_n, gated}, n, grid);
}

void bench_reset(void* problem, cudaStream_t stream) {
  static_cast<Problem*>(problem)->reset(stream);
}

int bench_run(void* problem, int set, int flags, int grid, cudaStream_t stream) {
  return static_cast<int>(static_cast<Problem*>(problem)->run(set, flags != 0, grid, stream));
}

void bench_destroy(void* problem) { delete static_cast<Problem*>(problem); }
}
