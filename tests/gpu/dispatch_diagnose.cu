// Where GEMM 1 with dispatch spends more time than GEMM 1 alone: the same rounds with parts of it
// left out, and how long tiles wait for rows.
//   dispatch_diagnose [shape=0] [ctas=4] [runs=40] [tail=32] [world=as many as GPUs]
#include <map>

#include "dispatch_timing.cuh"

namespace {

using namespace front;

void diagnose(int shape_index, int ctas, int runs, int tail, int world) {
  const ShapeSpec& spec = kShapes[shape_index];
  if (spec.gated != 0) {
    std::printf("shape %d is gated: the probes are not\n", shape_index);
    return;
  }
  Bench b(shape_of(spec, world, 0, tail), 0, 4711);
  std::printf("--- world %d M %d N %d K %d, %d local experts, top-%d, tail %d, c %d\n", world,
              spec.m, spec.n, spec.k, spec.local_experts, spec.topk, tail, ctas);
  if (!b.check({{Way::both, ctas}, {Way::no_wait, ctas}, {Way::peers_only, ctas}})) std::exit(1);
  const double sent = median(b.time({{Way::dispatch, ctas}}, runs / 2)[0].kernel);
  const std::pair<const char*, Variant> ways[] = {
      {"tiles alone", {Way::tiles, 0}},
      {"tiles, c SMs held as long as dispatch alone takes", {Way::spinning, ctas, sent}},
      {"both", {Way::both, ctas}},
      {"both, own rows in place", {Way::peers_only, ctas}},
      {"both, no tile waits for rows", {Way::no_wait, ctas}},
      {"both, no tile waits, no CTA only sends", {Way::no_wait, 0}}};
  std::vector<Variant> variants;
  for (const auto& [name, variant] : ways) variants.push_back(variant);
  const std::vector<Times> times = b.time(variants, runs);
  std::printf("%8.1f us dispatch alone\n", sent);
  for (size_t i = 0; i < variants.size(); ++i) {
    std::printf("%8.1f us (%.1f-%.1f) %s\n", median(times[i].kernel),
                quantile(times[i].kernel, 0.1), quantile(times[i].kernel, 0.9), ways[i].first);
  }
  b.row_waits();
  const int warm_up = 2;
  const std::vector<Times> timed = b.time({{Way::timed, ctas}}, runs);
  const RowWaits waits = b.row_waits();
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  const double loaders = static_cast<double>(runs + warm_up) * properties.multiProcessorCount;
  std::printf(
      "%8.1f us with waits timed: %.1f us a loader in %.1f waits, longest %.1f us; by when "
      "they began (us: us a loader):",
      median(timed[0].kernel), waits.ns * 1e-3 / loaders, waits.count / loaders,
      waits.longest_ns * 1e-3);
  for (int i = 0; i < RowWaits::kBuckets; ++i) {
    const double us = waits.by_time[i] * 1e-3 / loaders;
    if (us >= 0.05) std::printf(" %d:%.1f", i * RowWaits::kBucketUs, us);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, int> o{{"shape", 0}, {"ctas", 4}, {"runs", 40}, {"tail", 32}, {"world", 0}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t at = argument.find('=');
    const auto found = o.find(argument.substr(0, at));
    if (found == o.end() || at == std::string::npos) {
      std::fprintf(stderr, "unknown option %s\n", argument.c_str());
      return 2;
    }
    found->second = std::stoi(argument.substr(at + 1));
  }
  const int world = o["world"] > 0 ? o["world"] : gpus();
  if (world > gpus()) {
    std::fprintf(stderr, "world %d, but %d GPUs: a rank has a GPU of its own\n", world, gpus());
    return 2;
  }
  diagnose(o["shape"], o["ctas"], o["runs"], o["tail"], world);
  return 0;
}
