// The check matrix: 3 routings x 12 splits x 2 bands_per_segment x 20 shapes.
#pragma once

#include "operator_payload.cuh"

namespace harness {

// One (routing, bands_per_segment) of a shape: a sequential call, then the chosen splits with the
// same rows. Adds to *passed and *worst what came of them on the ranks of this process.
template <class E>
void check_splits(Group& group, const std::vector<double>& shares, const std::vector<int>& splits,
                  uint64_t tag, uint64_t seed, const std::vector<uint16_t*>& wanted, double limit,
                  const Link* link, int* passed, double* worst) {
  constexpr int kTokens = 64;
  const Shape& shape = group.shape();
  const int calls = static_cast<int>(splits.size()) + 1;
  std::vector<std::vector<Comparison>> results(shape.world, std::vector<Comparison>(calls));
  std::vector<uint8_t> failed(shape.world, 0);
  Meeting meeting(shape.world);
  const auto meet = [&] {  // memory is taken and given back while no kernel waits
    if (link != nullptr) {
      link->meet();
    } else {
      meeting.wait();
    }
  };
  group.each([&](Rank& rank) {
    std::mt19937_64 random(seed * 131 + rank.rank);
    Routing routing = make_routing(shape, shape.max_tokens, shares, 0.0, random);
    Comparison* const seen = upload(results[rank.rank]);
    meet();
    for (int i = 0; i < calls; ++i) {
      const bool overlapped = i > 0;
      const int ctas = overlapped ? splits[i - 1] : 16;
      group.poison(rank);
      group.launch_exchange(rank, routing, ctas);
      fill_rows_of<E>(rank, shape, tag);
      group.launch_combine(rank, routing, overlapped ? Mover::sm : Mover::sequential, ctas);
      const int64_t elements = int64_t{shape.max_tokens} * shape.n;
      if (overlapped) {
        compare<<<1024, 256, 0, rank.main>>>(rank.y, wanted[rank.rank], elements, seen + i);
      } else {
        CHECK_CUDA(cudaMemcpyAsync(wanted[rank.rank], rank.y, elements * 2,
                                   cudaMemcpyDeviceToDevice, rank.main));
        verify_y<E>(rank, shape, routing, 61, 37, tag);
      }
      oracle<E><<<kTokens, 256, 0, rank.main>>>(
          rank.y, routing.ids_d, routing.positions_d, routing.weights_d, shape.topk, shape.n,
          shape.k, rank.rank, shape.max_tokens / kTokens, 29, tag, seen + i);
      CHECK_CUDA(cudaGetLastError());
    }
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
    meet();
    CHECK_CUDA(cudaMemcpy(results[rank.rank].data(), seen, calls * sizeof(Comparison),
                          cudaMemcpyDeviceToHost));
    Verdict verdict;
    CHECK_CUDA(cudaMemcpy(&verdict, rank.verdict, sizeof(verdict), cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemset(rank.verdict, 0, sizeof(verdict)));
    failed[rank.rank] = rank.error->outcome != Outcome::ok || verdict.wrong != 0;
    if (failed[rank.rank] != 0) {
      std::printf("  rank %d: %llu elements of sequential are not those predicted; %s\n", rank.rank,
                  verdict.wrong, text(*rank.error).c_str());
    }
    cudaFree(seen);
    free_routing(routing);
  });
  const bool base = std::count(failed.begin(), failed.end(), 0) == shape.world;
  const std::string who = link != nullptr ? "rank " + std::to_string(link->rank) + ": " : "";
  for (int i = 0; i < calls; ++i) {
    unsigned long long different = 0;
    float error = 0.0f;
    for (const auto& of_rank : results) {
      different += of_rank[i].different;
      float e;
      std::memcpy(&e, &of_rank[i].worst_bits, sizeof(e));
      error = std::max(error, e);
    }
    *worst = std::max(*worst, static_cast<double>(error));
    const bool good = different == 0 && error <= limit;
    if (!good) {
      std::printf("  %s%s %d: %llu elements differ from sequential, error %.2e (at most %.0e)\n",
                  who.c_str(), i == 0 ? "sequential" : "split", i == 0 ? 16 : splits[i - 1],
                  different, error, limit);
    }
    if (i > 0) *passed += good && base;
  }
}

// `fraction` of the 1,440 checks, chosen by `seed`. True if all of them pass. `link`: this process
// has one rank; all ranks choose the same checks, and rank 0 says what came of its own.
template <class E>
bool check_matrix(int world, uint64_t seed, double fraction, const Link* link = nullptr) {
  const bool says = link == nullptr || link->rank == 0;
  const bool half = std::is_same_v<E, __half>;
  const double limit = half ? 2e-3 : 8e-3;
  const int splits[] = {2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24};
  const std::pair<int, int> widths[] = {
      {8192, 2048}, {7168, 2048}, {4096, 1536}, {1024, 4096}, {512, 2048}};
  const std::pair<const char*, double> routings[] = {
      {"balanced", 0.0}, {"moderate_skew", 1.6}, {"stress_skew", std::min(2.6, 0.95 * world)}};
  std::mt19937_64 choice(seed);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  int checks = 0, passed = 0, shape_number = 0;
  uint64_t tag = 1;  // of a combination: what a former one left cannot be taken for this one's
  double worst = 0.0;
  for (int m : {16384, 32768}) {
    for (const auto& [n, k] : widths) {
      for (int local_experts : {16, 64}) {
        ++shape_number;
        const int topk = n == 4096 ? 8 : 2;
        Shape shape{world, local_experts, topk, n, k, m / topk};
        shape.kind = {half ? Dtype::float16 : Dtype::bfloat16, n <= 512 ? 128 : 256, 0};
        shape.max_rows = static_cast<int64_t>(m * (std::max(1.0, routings[2].second) + 0.1));
        std::unique_ptr<Group> group;
        std::vector<uint16_t*> wanted;
        int of_shape = 0, good = 0;
        double error = 0.0;
        for (const auto& routing : routings) {
          for (int bands_per_segment : {1, 2}) {
            std::vector<int> chosen;
            for (int split : splits) {
              if (uniform(choice) < fraction) chosen.push_back(split);
            }
            ++tag;
            if (chosen.empty()) continue;
            if (group == nullptr) {
              group = std::make_unique<Group>(shape, link);
              wanted.resize(world);
              for (Rank& rank : group->ranks()) {
                fill_weights_of<E>(rank, shape);
                CHECK_CUDA(cudaMalloc(&wanted[rank.rank], int64_t{shape.max_tokens} * n * 2));
              }
            }
            for (Rank& rank : group->ranks()) {  // bounds hold for every bands_per_segment
              rank.exchange.plan.params.bands_per_segment = bands_per_segment;
            }
            const std::vector<double> shares =
                routing.second > 0.0 ? skew(shape, 0, routing.second) : std::vector<double>{};
            check_splits<E>(*group, shares, chosen, tag, seed + tag, wanted, limit, link, &good,
                            &error);
            of_shape += static_cast<int>(chosen.size());
          }
        }
        for (uint16_t* y : wanted) cudaFree(y);
        if (of_shape == 0) continue;
        if (says) {
          std::printf(
              "shape %d of 20: M %d N %d K %d, %d local experts, top-%d: %d of %d checks "
              "passed, largest error %.2e\n",
              shape_number, m, n, k, local_experts, topk, good, of_shape, error);
        }
        std::fflush(stdout);
        checks += of_shape;
        passed += good;
        worst = std::max(worst, error);
      }
    }
  }
  if (says) {
    std::printf("%d of %d checks passed, %d ranks%s, %s, largest error %.2e of at most %.0e\n",
                passed, checks, world, link != nullptr ? " (those of rank 0)" : "",
                half ? "fp16" : "bf16", worst, limit);
  }
  return passed == checks && checks > 0;
}

}  // namespace harness
