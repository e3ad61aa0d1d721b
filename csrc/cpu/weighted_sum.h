// The sum of a token's rows: fp32, k ascending, one cast, so that results repeat bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numeric.h"

namespace tilemoe::cpu {

// y [tokens, n] = sum over k of weights [tokens, topk] * row_of(token * topk + k), which is [n], or
// null for a route that was dropped.
template <class T, class RowOf>
void weighted_sum(std::int64_t tokens, std::int32_t topk, std::int64_t n, const float* weights,
                  RowOf row_of, T* y) {
  std::vector<float> sum(n);
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int k = 0; k < topk; ++k) {
      const std::int64_t route = token * topk + k;
      const T* row = row_of(route);
      if (row == nullptr) continue;
      const float weight = weights[route];
      for (std::int64_t i = 0; i < n; ++i) sum[i] += weight * to_float(row[i]);
    }
    for (std::int64_t i = 0; i < n; ++i) from_float(sum[i], &y[token * n + i]);
  }
}

}  // namespace tilemoe::cpu
