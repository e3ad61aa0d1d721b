// A group whose calls are checked on the GPU, and routings of all kinds for it.
#pragma once

#include <cmath>

#include "operator_payload.cuh"

namespace harness {

inline int failures = 0;  // checks that have failed

inline void report(bool passed, const std::string& text) {
  std::printf("%s: %s\n", text.c_str(), passed ? "ok" : "FAILED");
  std::fflush(stdout);
  failures += !passed;
}

template <class E>
struct Checked {
  Group group;

  explicit Checked(const Shape& shape, const Link* link = nullptr) : group(shape, link) {
    for (Rank& rank : group.ranks()) fill_weights_of<E>(rank, shape);
  }

  void fill(Rank& rank) { fill_rows_of<E>(rank, group.shape(), 0); }
  void check(Rank& rank, const Routing& routing, int token_step, int column_step) {
    verify_y<E>(rank, group.shape(), routing, token_step, column_step, 0);
  }
  void call(Rank& rank, const Routing& routing, Mover mover, int ctas, int token_step = 1,
            int column_step = 1) {
    ++*rank.calls;
    *rank.at = "poison";
    group.poison(rank);
    rank.reach(kPoisoned);
    *rank.at = "exchange";
    group.launch_exchange(rank, routing, ctas);
    rank.reach(kExchanged);
    *rank.at = "fill";
    fill(rank);
    rank.reach(kFilled);
    *rank.at = "combine";
    group.launch_combine(rank, routing, mover, ctas);
    rank.reach(kCombined);
    *rank.at = "check";
    check(rank, routing, token_step, column_step);
    rank.reach(kChecked);
    CHECK_CUDA(cudaGetLastError());
    *rank.at = "next";
  }
  void wait(Rank& rank) {
    *rank.at = "wait";
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
  }
  // Whether a call has gone wrong since the last look, as far as this rank knows.
  bool suspects(Rank& rank) {
    Verdict v;
    CHECK_CUDA(cudaMemcpy(&v, rank.verdict, sizeof(v), cudaMemcpyDeviceToHost));
    return v.wrong != 0 || rank.error->outcome != Outcome::ok;
  }
  // Elements that were wrong since the last look; says where.
  unsigned long long wrong(const std::string& name) {
    unsigned long long sum = 0;
    for (Rank& rank : group.ranks()) {
      rank.use();
      CHECK_CUDA(cudaDeviceSynchronize());
      Verdict v;
      CHECK_CUDA(cudaMemcpy(&v, rank.verdict, sizeof(v), cudaMemcpyDeviceToHost));
      CHECK_CUDA(cudaMemset(rank.verdict, 0, sizeof(v)));
      sum += v.wrong;
      if (v.wrong != 0) {
        std::printf("  %s: rank %d: %llu wrong, first in call %llu token %d column %d\n",
                    name.c_str(), rank.rank, v.wrong, v.first_epoch, v.first_token, v.first_column);
      }
      if (rank.error->outcome != Outcome::ok) {
        std::printf("  %s: rank %d: %s\n", name.c_str(), rank.rank, text(*rank.error).c_str());
        ++sum;
      }
    }
    return sum;
  }
};

inline std::vector<Routing> many_routings(const Shape& shape, int count, std::mt19937_64& random) {
  std::vector<Routing> result;
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int i = 0; i < count; ++i) {
    const int tokens = i % 6 == 5 ? 0 : 1 + static_cast<int>(random() % shape.max_tokens);
    std::vector<double> shares;
    if (i % 4 == 1) shares = skew(shape, random() % shape.world, std::min(1.6, 0.95 * shape.world));
    if (i % 4 == 2) shares = skew(shape, random() % shape.world, std::min(2.6, 0.95 * shape.world));
    if (i % 4 == 3) {
      shares.resize(shape.experts());
      for (double& share : shares) share = uniform(random) < 0.4 ? 1e-3 : uniform(random);
    }
    const double dropped = i % 5 == 0 ? 0.3 : i % 17 == 7 ? 1.0 : 0.0;
    result.push_back(make_routing(shape, tokens, shares, dropped, random));
  }
  return result;
}

inline void free_routings(std::vector<std::vector<Routing>>& sets) {
  for (auto& set : sets) {
    for (Routing& r : set) free_routing(r);
  }
}

}  // namespace harness
