// Times the whole operator: overlapped at every split against the same kernels one after another,
// interleaved, all GPUs busy, slowest rank. What fails its check is not timed. One JSON line a
// variant is appended to `out`. One rank a GPU, as many as there are unless `ranks` says fewer.
//   operator_bench [ranks=N] [out=FILE] [commit=SHA] [driver=VERSION] [runs=100]
//                  [shapes=0,1,2,3,4] [routings=0,1,2] [layouts=0] [bands=1] [tiles=256,128]
//                  [chunk=65536] [tail=-1] [splits=1,2,4,...,24]
//   operator_bench movers [ranks=N] [runs=20] [shapes=0,3] [chunks=65536,131072]
//                  [splits=1,2,4,6,8,12,16]: plain stores against bulk copies (bulk_mover.cu)
#include <ctime>
#include <map>

#include "operator_timing.cuh"

namespace {

using namespace harness;

struct Options {
  std::string out, commit = "unknown", driver = "unknown";
  int ranks = 0, runs = 100, chunk = 64 << 10, tail = -1;
  std::vector<int> shapes{0, 1, 2, 3, 4}, routings{0, 1, 2}, layouts{0}, bands{1}, tiles{256, 128},
      splits{1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24}, chunks{64 << 10, 128 << 10};
};

std::string now_text() {
  char text[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

// Copy alone and beside the producer, by plain stores and by bulk copies.
void movers(const Options& o, const ShapeSpec& spec, int chunk) {
  const Shape shape = shape_of(spec, o.ranks, spec.n <= 512 ? 128 : 256, chunk, o.tail);
  Bench b(shape, spec, 0, o.runs * 7919);
  std::vector<Variant> variants;
  const int kinds[] = {0, 4, 6, 12};
  for (bool split : {true, false}) {
    for (int pieces : kinds) {
      for (int c : o.splits) {
        const Mover mover = split ? Mover::sequential : Mover::sm;
        variants.push_back(
            {pieces == 0 ? "plain" : "bulk x" + std::to_string(pieces), mover, c, split, pieces});
      }
    }
  }
  if (variants.size() > 64) {
    std::printf("movers: at most 8 splits\n");
    std::exit(2);
  }
  const double bytes = static_cast<double>(b.most_remote_bytes());
  std::printf(
      "--- movers: M %d N %d K %d, %d ranks, balanced, chunks of %d KiB, %.0f MB out of a "
      "rank\n",
      spec.m, spec.n, spec.k, o.ranks, chunk >> 10, bytes * 1e-6);
  if (!b.check(variants)) std::exit(1);
  const std::vector<Times> times = b.time(variants, o.runs);
  for (bool split : {true, false}) {
    std::printf(
        "%s\n%-10s",
        split ? "copy alone, GB/s out of a GPU (us)" : "operator with GEMM beside, us (p10-p90)",
        "CTAs");
    for (int c : o.splits) std::printf("%18d", c);
    for (size_t i = 0; i < variants.size(); ++i) {
      if (variants[i].split != split) continue;
      if (variants[i].ctas == o.splits[0]) std::printf("\n%-10s", variants[i].name.c_str());
      char cell[40];
      if (split) {
        const double us = median(times[i].copy);
        std::snprintf(cell, sizeof(cell), "%.0f (%.0f)", bytes / us * 1e-3, us);
      } else {
        std::snprintf(cell, sizeof(cell), "%.0f (%.0f-%.0f)", median(times[i].total),
                      quantile(times[i].total, 0.1), quantile(times[i].total, 0.9));
      }
      std::printf("%18s", cell);
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

int cases = 0, slower_cases = 0;  // than sequential, of all variants

void bench(const Options& o, const ShapeSpec& spec, int routing, Layout layout, int bands,
           int tile_n) {
  Shape shape = shape_of(spec, o.ranks, tile_n, o.chunk, o.tail);
  shape.layout = layout;
  shape.bands_per_segment = bands;
  Bench b(shape, spec, routing, o.runs * 7919 + routing);
  std::vector<Variant> alone;
  for (int c : {2, 4, 8, 10, 12, 16, 20, 24, 32, 48, 64, 132}) {
    alone.push_back({"split_c" + std::to_string(c), Mover::sequential, c, true});
  }
  std::vector<Variant> variants;
  for (int c : o.splits) variants.push_back({"sm", Mover::sm, c, false});
  variants.push_back({"none", Mover::none, 0, false});
  std::printf(
      "--- M %d N %d K %d, %d experts, top-%d, %s, layout %d, bands_per_segment %d, tile_n "
      "%d, chunk %d, tail %d\n",
      spec.m, spec.n, spec.k, spec.local_experts, spec.topk, kRoutings[routing].first, int(layout),
      bands, tile_n, o.chunk, o.tail);
  if (!b.check(variants)) std::exit(1);
  const PlanSizes sizes = b.sizes();
  const auto padding = static_cast<long long>(sizes.rows - sizes.valid_rows);
  std::printf("rank 0: %lld rows and %lld of padding, %d bands, %d segments, %d chunks\n",
              static_cast<long long>(sizes.valid_rows), padding, sizes.bands, sizes.segments,
              sizes.chunks);

  const std::vector<Times> parts = b.time(alone, 12);
  size_t best = 0;
  std::printf("copy alone by CTAs:");
  for (size_t i = 0; i < alone.size(); ++i) {
    // Of equals the largest: the smallest that fills the link is at the edge.
    if (median(parts[i].copy) < 1.005 * median(parts[best].copy)) best = i;
    std::printf(" %d:%.1f", alone[i].ctas, median(parts[i].copy));
  }
  std::printf("\n");
  const int copy_ctas = alone[best].ctas;
  variants.push_back({"sequential", Mover::sequential, copy_ctas, false});
  variants.push_back({"split", Mover::sequential, copy_ctas, true});
  const std::vector<Times> times = b.time(variants, o.runs);
  const Times& sequential = times[times.size() - 2];
  const Times& split = times.back();
  const double gemm = median(split.gemm), copy = median(split.copy), scale = median(split.scale);
  const double bound = std::max(gemm, copy) + scale;
  const double exchange = median(split.exchange);
  // No copy can hide in front of the first segment.
  const double ceiling = std::min(1.0, (gemm - median(split.ready)) / copy);
  std::printf(
      "exchange %.1f gemm %.1f copy %.1f (c %d) scale %.1f bound %.1f sequential %.1f err %.1e\n",
      exchange, gemm, copy, copy_ctas, scale, bound, median(sequential.total), b.max_rel_err());
  std::FILE* const file = o.out.empty() ? nullptr : std::fopen(o.out.c_str(), "a");
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  size_t fastest = 0;  // of the first half of the runs
  double of_first_half = 0.0;
  for (size_t i = 0; i + 1 < times.size(); ++i) {
    const Variant& v = variants[i];
    const Times& t = times[i];
    std::vector<double> ratio;
    for (size_t j = 0; j < t.total.size(); ++j) ratio.push_back(t.total[j] / sequential.total[j]);
    const double total = median(t.total), exposed = median(t.exposed());
    const double overlap = 1.0 - exposed / copy;
    const double hidden = (gemm + copy - (total - scale)) / std::min(gemm, copy);
    const auto middle = t.total.begin() + t.total.size() / 2;
    const double first_half = median({t.total.begin(), middle});
    if (v.mover != Mover::sequential) {
      if (of_first_half == 0.0 || first_half < of_first_half) {
        fastest = i;
        of_first_half = first_half;
      }
      ++cases;
      if (median(ratio) > 1.03 && total - median(sequential.total) > 5.0) {
        ++slower_cases;
        std::printf("SLOWER THAN SEQUENTIAL: ");
      }
    }
    std::printf(
        "%-10s c %2d: %8.1f (%.1f-%.1f) of bound %.3f  of sequential %.3f (%.3f-%.3f)  "
        "exposed %.1f overlap %.3f hidden %.3f backlog %.0f drained %.0f\n",
        v.name.c_str(), v.ctas, total, quantile(t.total, 0.1), quantile(t.total, 0.9),
        total / bound, median(ratio), quantile(ratio, 0.1), quantile(ratio, 0.9), exposed, overlap,
        hidden, median(t.backlog), median(t.drained));
    if (file == nullptr) continue;
    std::fprintf(
        file,
        "{\"schema\": 1, \"bench\": \"operator\", \"time\": \"%s\", \"commit\": \"%s\", "
        "\"versions\": {\"cuda\": \"%d.%d\"}, \"gpu\": \"%s\", \"driver\": \"%s\", \"ranks\": %d, "
        "\"dtype\": \"bfloat16\", \"routing\": \"%s\", \"hot_ratio\": %.3f, \"seed\": %d, "
        "\"topk\": %d, \"gemm_m\": %d, \"gemm_n\": %d, \"gemm_k\": %d, \"local_experts\": %d, "
        "\"layout\": \"%s\", \"tile_n\": %d, \"chunk_bytes\": %d, \"local_tail_bands\": %d, "
        "\"bands_per_segment\": %d, \"mover\": \"%s\", \"num_consumer_ctas\": %d, \"runs\": %zu, "
        "\"padding_rows\": %lld, \"bands\": %d, ",
        now_text().c_str(), o.commit.c_str(), CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
        properties.name, o.driver.c_str(), o.ranks, kRoutings[routing].first, b.hot_ratio(),
        o.runs * 7919 + routing, spec.topk, spec.m, spec.n, spec.k, spec.local_experts,
        layout == Layout::compact ? "compact" : "aligned", tile_n, o.chunk, o.tail, bands,
        v.name.c_str(), v.ctas, t.total.size(), padding, sizes.bands);
    std::fprintf(
        file,
        "\"exchange_us\": %.2f, \"gemm_alone_us\": %.2f, \"copy_alone_us\": %.2f, "
        "\"copy_alone_ctas\": %d, "
        "\"scale_us\": %.2f, \"sequential_us\": %.2f, \"sequential_p10_us\": %.2f, "
        "\"sequential_p90_us\": %.2f, \"overlapped_us\": %.2f, \"overlapped_p10_us\": %.2f, "
        "\"overlapped_p90_us\": %.2f, \"bound_us\": %.2f, \"of_bound\": %.4f, "
        "\"of_sequential\": %.4f, \"of_sequential_p10\": %.4f, \"of_sequential_p90\": %.4f, "
        "\"exposed_us\": %.2f, \"overlap_ratio\": %.4f, \"overlap_ceiling\": %.4f, "
        "\"hidden_share\": %.4f, "
        "\"backlog\": %.0f, \"chunks_drained\": %.0f, \"max_rel_err\": %.3e, "
        "\"bit_equal\": true}\n",
        exchange, gemm, copy, copy_ctas, scale, median(sequential.total),
        quantile(sequential.total, 0.1), quantile(sequential.total, 0.9), total,
        quantile(t.total, 0.1), quantile(t.total, 0.9), bound, total / bound, median(ratio),
        quantile(ratio, 0.1), quantile(ratio, 0.9), exposed, overlap, ceiling, hidden,
        median(t.backlog), median(t.drained), b.max_rel_err());
  }
  const std::vector<double>& all = times[fastest].total;
  const double best_us = median({all.begin() + all.size() / 2, all.end()});
  std::printf(
      "fastest of the first half of the runs: %s c %d; in the second half %.1f us, %.3f of "
      "the bound; overlap ratio's ceiling %.3f\n",
      variants[fastest].name.c_str(), variants[fastest].ctas, best_us, best_us / bound, ceiling);
  if (file != nullptr) std::fclose(file);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  // Streams of ranks that share a GPU must not share a hardware queue: one would wait for another.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  Options o;
  const bool compare_movers = argc > 1 && std::string(argv[1]) == "movers";
  if (compare_movers) {
    o.runs = 20;
    o.shapes = {0, 3};
    o.splits = {1, 2, 4, 6, 8, 12, 16};
  }
  for (int i = compare_movers ? 2 : 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t at = argument.find('=');
    const std::string key = argument.substr(0, at);
    const std::string value = at == std::string::npos ? "" : argument.substr(at + 1);
    std::map<std::string, std::vector<int>*> lists{
        {"shapes", &o.shapes}, {"routings", &o.routings}, {"layouts", &o.layouts},
        {"bands", &o.bands},   {"tiles", &o.tiles},       {"splits", &o.splits},
        {"chunks", &o.chunks}};
    if (lists.count(key) != 0) {
      *lists[key] = list(value);
    } else if (key == "out") {
      o.out = value;
    } else if (key == "commit") {
      o.commit = value;
    } else if (key == "driver") {
      o.driver = value;
    } else if (key == "ranks") {
      o.ranks = std::stoi(value);
    } else if (key == "runs") {
      o.runs = std::stoi(value);
    } else if (key == "chunk") {
      o.chunk = std::stoi(value);
    } else if (key == "tail") {
      o.tail = std::stoi(value);
    } else {
      std::fprintf(stderr, "unknown option %s\n", argument.c_str());
      return 2;
    }
  }
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  if (o.ranks == 0) o.ranks = devices;
  if (o.ranks < 2 || o.ranks > devices) {
    std::fprintf(stderr, "ranks: got %d of %d GPUs; wanted 2 or more, one a GPU\n", o.ranks,
                 devices);
    return 2;
  }
  if (compare_movers) {
    for (int shape : o.shapes) {
      for (int chunk : o.chunks) movers(o, kShapes[shape], chunk);
    }
    return 0;
  }
  for (int shape : o.shapes) {
    for (int tile : o.tiles) {
      if (tile == 128 && kShapes[shape].n > 1024) continue;  // never the faster one there
      for (int routing : o.routings) {
        for (int layout : o.layouts) {
          for (int bands : o.bands) {
            bench(o, kShapes[shape], routing, static_cast<Layout>(layout), bands, tile);
          }
        }
      }
    }
  }
  std::printf("%d of %d cases slower than sequential\n", slower_cases, cases);
  return slower_cases == 0 ? 0 : 1;
}
