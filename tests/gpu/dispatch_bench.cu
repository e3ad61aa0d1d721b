// Times GEMM 1 with dispatch inside against each alone, at several numbers of sending CTAs:
// interleaved, all GPUs busy, slowest rank. What fails its check is not timed. One JSON line a
// shape and number of CTAs is appended to `out`.
//   dispatch_bench [out=FILE] [commit=SHA] [driver=VERSION] [runs=100] [shapes=0,1,2,3,4,5,6,7,8]
//                  [routings=0] [ctas=4,0,2,6,8,12] [tail=32] [world=as many as GPUs]
#include <ctime>
#include <map>

#include "dispatch_timing.cuh"

namespace {

using namespace front;

struct Options {
  std::string out, commit = "unknown", driver = "unknown";
  int runs = 100, tail = 32, world = 0;
  std::vector<int> shapes{0, 1, 2, 3, 4, 5, 6, 7, 8}, routings{0}, ctas{4, 0, 2, 6, 8, 12};
};

std::string now_text() {
  char text[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

void bench(const Options& o, int shape_index, int routing, int world) {
  const ShapeSpec& spec = kShapes[shape_index];
  const Shape shape = shape_of(spec, world, routing, o.tail);
  const int seed = o.runs * 7919 + routing;
  Bench b(shape, routing, seed);
  std::vector<Variant> variants{{Way::tiles, 0}};
  for (int c : o.ctas) variants.push_back({Way::dispatch, c});
  for (int c : o.ctas) variants.push_back({Way::both, c});
  variants.push_back({Way::watched, o.ctas[0]});
  std::printf("--- world %d M %d N %d K %d, %d local experts, top-%d, %s, %s, tail %d\n", world,
              spec.m, spec.n, spec.k, spec.local_experts, spec.topk,
              spec.gated != 0 ? "gated" : "gelu", kRoutings[routing].first, o.tail);
  if (!b.check(variants)) std::exit(1);
  const std::vector<Times> times = b.time(variants, o.runs);

  const size_t count = o.ctas.size();
  size_t best = 1;
  for (size_t i = 1; i <= count; ++i) {
    if (median(times[i].kernel) < median(times[best].kernel)) best = i;
  }
  const std::vector<double>&gemm = times[0].kernel, &dispatch = times[best].kernel;
  const double exchange = median(times[1 + count].exchange);
  std::printf("exchange and plan %.1f, GEMM 1 alone %.1f (%.1f-%.1f), dispatch alone", exchange,
              median(gemm), quantile(gemm, 0.1), quantile(gemm, 0.9));
  for (size_t i = 1; i <= count; ++i) {
    std::printf(" %d:%.1f", o.ctas[i - 1], median(times[i].kernel));
  }
  std::printf(", err %.1e\n", b.max_rel_err());
  const Times& watched = times.back();
  std::printf(
      "since the exchange's end, c %d on one SM less: GEMM 1 begins %.1f, last row %.1f, end "
      "%.1f\n",
      o.ctas[0], median(watched.start), median(watched.rows), median(watched.end));
  std::FILE* const file = o.out.empty() ? nullptr : std::fopen(o.out.c_str(), "a");
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  for (size_t i = 0; i < count; ++i) {
    const std::vector<double>&both = times[1 + count + i].kernel, &alone = times[1 + i].kernel;
    std::vector<double> ratio;
    for (size_t j = 0; j < both.size(); ++j) {
      ratio.push_back(both[j] / std::max(gemm[j], dispatch[j]));
    }
    std::printf("c %3d: both %8.1f (%.1f-%.1f), of the longer %.3f (%.3f-%.3f)\n", o.ctas[i],
                median(both), quantile(both, 0.1), quantile(both, 0.9), median(ratio),
                quantile(ratio, 0.1), quantile(ratio, 0.9));
    if (file == nullptr) continue;
    std::fprintf(
        file,
        "{\"schema\": 1, \"bench\": \"dispatch\", \"time\": \"%s\", \"commit\": \"%s\", "
        "\"versions\": {\"cuda\": \"%d.%d\"}, \"gpu\": \"%s\", \"driver\": \"%s\", \"ranks\": %d, "
        "\"dtype\": \"bfloat16\", \"routing\": \"%s\", \"hot_ratio\": %.3f, \"seed\": %d, "
        "\"topk\": %d, \"gemm_m\": %d, \"gemm_n\": %d, \"gemm_k\": %d, \"local_experts\": %d, "
        "\"gated\": %s, \"tile_n\": %d, \"local_tail_bands\": %d, \"num_dispatch_ctas\": %d, "
        "\"runs\": %zu, ",
        now_text().c_str(), o.commit.c_str(), CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
        properties.name, o.driver.c_str(), world, kRoutings[routing].first, b.hot_ratio(), seed,
        spec.topk, spec.m, spec.n, spec.k, spec.local_experts, spec.gated != 0 ? "true" : "false",
        shape.kind.tile_n, o.tail, o.ctas[i], both.size());
    std::fprintf(
        file,
        "\"exchange_us\": %.2f, \"gemm_alone_us\": %.2f, \"gemm_alone_p10_us\": %.2f, "
        "\"gemm_alone_p90_us\": %.2f, \"dispatch_alone_us\": %.2f, \"dispatch_alone_p10_us\": "
        "%.2f, "
        "\"dispatch_alone_p90_us\": %.2f, \"dispatch_best_us\": %.2f, \"dispatch_best_ctas\": %d, "
        "\"both_us\": %.2f, \"both_p10_us\": %.2f, \"both_p90_us\": %.2f, \"of_longer\": %.4f, "
        "\"of_longer_p10\": %.4f, \"of_longer_p90\": %.4f, \"max_rel_err\": %.3e, "
        "\"bit_equal\": true}\n",
        exchange, median(gemm), quantile(gemm, 0.1), quantile(gemm, 0.9), median(alone),
        quantile(alone, 0.1), quantile(alone, 0.9), median(dispatch), o.ctas[best - 1],
        median(both), quantile(both, 0.1), quantile(both, 0.9), median(ratio), quantile(ratio, 0.1),
        quantile(ratio, 0.9), b.max_rel_err());
  }
  if (file != nullptr) std::fclose(file);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  const std::map<std::string, std::vector<int>*> lists{
      {"shapes", &o.shapes}, {"routings", &o.routings}, {"ctas", &o.ctas}};
  const std::map<std::string, int*> numbers{
      {"runs", &o.runs}, {"tail", &o.tail}, {"world", &o.world}};
  const std::map<std::string, std::string*> texts{
      {"out", &o.out}, {"commit", &o.commit}, {"driver", &o.driver}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t at = argument.find('=');
    const std::string key = argument.substr(0, at);
    const std::string value = at == std::string::npos ? "" : argument.substr(at + 1);
    if (lists.count(key) != 0) {
      *lists.at(key) = list(value);
    } else if (numbers.count(key) != 0) {
      *numbers.at(key) = std::stoi(value);
    } else if (texts.count(key) != 0) {
      *texts.at(key) = value;
    } else {
      std::fprintf(stderr, "unknown option %s\n", argument.c_str());
      return 2;
    }
  }
  const int world = o.world > 0 ? o.world : gpus();
  if (world > gpus()) {
    std::fprintf(stderr, "world %d, but %d GPUs: a rank has a GPU of its own\n", world, gpus());
    return 2;
  }
  for (int shape : o.shapes) {
    for (int routing : o.routings) bench(o, shape, routing, world);
  }
  return 0;
}
