// Would a copy engine bring rows back faster than SMs? Times the operator with the rows' return by
// copy engines (copy_ahead.cuh) against the consumer at some splits and against none: interleaved,
// fresh rows of A, all GPUs busy, slowest rank. It is the engine's best case: the host knows C in
// advance and has queued everything before the GEMM begins. What is not bit-equal to sequential is
// not timed.
//   copy_engine_bench [ranks=N] [runs=100] [shapes=0,1,2,3,4] [tiles=256,128] [splits=4,6,8,10,12]
//                     [copies=1,2,4] [least=8388608] [checks=5] [head_start_us=3000] [tail=-1]
//                     [routing=0]
// routing: of kRoutings; but for 0 runs differ in length, so that each is a copy of its own.
// copies: most copies a peer; least: bytes of a copy, at least. A run in which no rank goes on for
// 20 s is ended with 3: nothing on the GPU ends the wait of a stream.
#include <map>
#include <set>

#include "copy_ahead.cuh"

namespace {

using namespace harness;

constexpr double kLimitS = 20.0;
constexpr int64_t kDeviceTimeoutNs = 10'000'000'000;  // so that the kernels have ended by then

struct Options {
  int ranks = 0, runs = 100, least = 8 << 20, checks = 5, head_start_us = 3000, tail = -1,
      routing = 0;
  std::vector<int> shapes{0, 1, 2, 3, 4}, tiles{256, 128}, splits{4, 6, 8, 10, 12}, copies{1, 2, 4};
};

// Ends the process when the ranks stand still.
class Watch {
 public:
  explicit Watch(const Bench& bench) : bench_(bench), thread_([this] { run(); }) {}
  ~Watch() {
    stop_ = true;
    thread_.join();
  }
  Watch(const Watch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  void run() {
    int64_t last = -1;
    Clock::time_point start = Clock::now();
    while (!stop_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (const int64_t now = bench_.rounds_ended(); now != last) {
        last = now;
        start = Clock::now();
      } else if (Clock::now() - start > std::chrono::duration<double>(kLimitS)) {
        std::printf("no rank has ended a round for %.0f s, after %lld: ended\n", kLimitS,
                    static_cast<long long>(last));
        std::fflush(stdout);
        std::_Exit(3);
      }
    }
  }

  const Bench& bench_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// Every second one, from `first` on.
std::vector<double> half(const std::vector<double>& values, size_t first) {
  std::vector<double> result;
  for (size_t i = first; i < values.size(); i += 2) result.push_back(values[i]);
  return result;
}

// Of variants [begin, end) the one that was fastest in the even rounds.
size_t fastest(const std::vector<Times>& times, size_t begin, size_t end) {
  size_t best = begin;
  for (size_t i = begin; i < end; ++i) {
    if (median(half(times[i].total, 0)) < median(half(times[best].total, 0))) best = i;
  }
  return best;
}

// True if the engine gains 3 %.
bool compare(const Options& o, const ShapeSpec& spec, int tile_n) {
  const Shape shape = shape_of(spec, o.ranks, tile_n, 64 << 10, o.tail);
  Bench b(shape, spec, o.routing, o.runs * 7919, int64_t{o.head_start_us} * 1000);
  for (Rank& rank : b.group().ranks()) {
    Group::change_view(rank, [](RankView& view) { view.wait_timeout_ns = kDeviceTimeoutNs; });
    rank.exchange.group_timeout_ns = kDeviceTimeoutNs;
  }
  b.group().make_engines(1, 1);
  std::printf("--- M %d N %d K %d, %d local experts, top-%d, %d ranks, %s, tile_n %d\n", spec.m,
              spec.n, spec.k, spec.local_experts, spec.topk, o.ranks, kRoutings[o.routing].first,
              tile_n);
  const auto plain = [](const std::string& name, Mover mover, int ctas) {
    return Variant{name, mover, ctas, false};
  };
  const Watch watch(b);
  std::vector<Variant> variants;
  const auto add = [&](const Variant& variant) {
    for (int i = 0; i < o.checks; ++i) {
      if (b.check({variant})) continue;
      b.group().reset();  // a deadline may have failed the heap
      return false;
    }
    variants.push_back(variant);
    return true;
  };
  bool good = true;
  for (int c : o.splits) good = add(plain("sm " + std::to_string(c), Mover::sm, c)) && good;
  const size_t sms = variants.size();
  good = add(plain("none", Mover::none, 0)) && good;
  if (!good) std::exit(1);
  const size_t first_engine = variants.size();
  std::vector<std::unique_ptr<CopyAhead>> engines;
  std::set<std::string> cuts;
  for (int most : o.copies) {
    auto engine = std::make_unique<CopyAhead>(b, most, o.least);
    const std::string words = engine->words();
    if (!cuts.insert(words).second) continue;  // `least` lets it cut no finer than one before
    Variant variant = plain("engine " + std::to_string(most), Mover::none, 0);
    variant.launch = [e = engine.get()](Rank& rank, const CombineParams& p, int fresh) {
      e->launch(rank, p, fresh);
    };
    std::printf("%-16s rank 0: %s\n", variant.name.c_str(), words.c_str());
    if (add(variant)) engines.push_back(std::move(engine));
  }
  if (engines.empty()) std::exit(1);

  const std::vector<Times> times = b.time(variants, o.runs);
  const size_t best_sm = fastest(times, 0, sms);
  const size_t best_engine = fastest(times, first_engine, variants.size());
  std::printf("%-16s %26s %26s %12s\n", "", "us (p10-p90)", "of best sm (p10-p90)", "host us");
  std::vector<double> gain;
  for (size_t i = 0; i < variants.size(); ++i) {
    const std::vector<double>& total = times[i].total;
    std::vector<double> ratio;  // in the odd rounds; the best was chosen in the even ones
    for (size_t j = 1; j < total.size(); j += 2) {
      ratio.push_back(total[j] / times[best_sm].total[j]);
    }
    if (i == best_engine) gain = ratio;
    char us[40], of_sm[40], host[24] = "";
    std::snprintf(us, sizeof(us), "%.1f (%.1f-%.1f)", median(total), quantile(total, 0.1),
                  quantile(total, 0.9));
    std::snprintf(of_sm, sizeof(of_sm), "%.3f (%.3f-%.3f)", median(ratio), quantile(ratio, 0.1),
                  quantile(ratio, 0.9));
    if (i >= first_engine) {
      const std::vector<double> host_us = engines[i - first_engine]->host_us();
      std::snprintf(host, sizeof(host), "%.0f%s", median(host_us),
                    quantile(host_us, 0.9) > o.head_start_us ? " LATE" : "");
    }
    std::printf("%-16s %26s %26s %12s%s\n", variants[i].name.c_str(), us, of_sm, host,
                i == best_sm || i == best_engine ? " *" : "");
  }
  const bool gains = median(gain) <= 0.97;
  std::printf("%s against %s: %.3f (%.3f-%.3f); 3 %% gained: %s\n",
              variants[best_engine].name.c_str(), variants[best_sm].name.c_str(), median(gain),
              quantile(gain, 0.1), quantile(gain, 0.9), gains ? "yes" : "no");
  std::fflush(stdout);
  return gains;
}

}  // namespace

int main(int argc, char** argv) {
  // A stream whose front end waits must share its hardware queue with no other, and no kernel may
  // be loaded meanwhile.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  Options o;
  const std::map<std::string, std::vector<int>*> lists{
      {"shapes", &o.shapes}, {"tiles", &o.tiles}, {"splits", &o.splits}, {"copies", &o.copies}};
  const std::map<std::string, int*> numbers{{"ranks", &o.ranks},
                                            {"runs", &o.runs},
                                            {"least", &o.least},
                                            {"checks", &o.checks},
                                            {"tail", &o.tail},
                                            {"routing", &o.routing},
                                            {"head_start_us", &o.head_start_us}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t at = argument.find('=');
    const std::string key = argument.substr(0, at);
    const std::string value = at == std::string::npos ? "" : argument.substr(at + 1);
    if (lists.count(key) != 0) {
      *lists.at(key) = list(value);
    } else if (numbers.count(key) != 0) {
      *numbers.at(key) = std::stoi(value);
    } else {
      std::fprintf(stderr, "unknown option %s\n", argument.c_str());
      return 2;
    }
  }
  const int devices = gpus();
  if (o.ranks == 0) o.ranks = devices;
  if (o.ranks < 2 || o.ranks > devices || o.routing < 0 || o.routing > 3 || o.splits.empty() ||
      o.checks < 1 || o.runs < 4) {
    std::fprintf(
        stderr,
        "got ranks %d of %d GPUs, routing %d, %zu splits, checks %d, runs %d; wanted two ranks or "
        "more, one a GPU, routing 0 to 3, a split, a check and 4 runs\n",
        o.ranks, devices, o.routing, o.splits.size(), o.checks, o.runs);
    return 2;
  }
  int gained = 0, cases = 0;
  for (int shape : o.shapes) {
    for (int tile : o.tiles) {
      if (tile == 128 && kShapes[shape].n > 1024) continue;  // never the faster one there
      ++cases;
      gained += compare(o, kShapes[shape], tile);
    }
  }
  std::printf("3 %% gained in %d of %d cases\n", gained, cases);
}
