#include "routes.h"

#include <algorithm>

namespace tilemoe::cpu {

std::string Routes::count(const std::int32_t* expert_ids, std::int64_t tokens, std::int32_t topk) {
  const std::int32_t experts = static_cast<std::int32_t>(counts.size());
  for (std::int64_t i = 0; i < tokens * topk; ++i) {
    const std::int32_t expert = expert_ids[i];
    const auto token = [&] { return std::to_string(i / topk); };
    if (expert < -1 || expert >= experts) {
      return "expert id " + std::to_string(expert) + " of token " + token() + " is outside [-1, " +
             std::to_string(experts) + "): -1 means dropped";
    }
    if (expert == -1) continue;
    for (std::int64_t j = i / topk * topk; j < i; ++j) {
      if (expert_ids[j] == expert) {  // would break the bound that buffers are made for
        return "token " + token() + " goes twice to expert " + std::to_string(expert) +
               ": the experts of a token must differ";
      }
    }
    ++counts[expert];
  }
  return "";
}

std::string Routes::read(const std::int32_t* expert_ids, std::int64_t tokens_in, std::int32_t topk,
                         std::int32_t experts) {
  const std::int64_t routes = tokens_in * topk;
  counts.assign(experts, 0);
  expert.assign(expert_ids, expert_ids + routes);
  std::string error = count(expert_ids, tokens_in, topk);
  if (!error.empty()) {
    std::fill(counts.begin(), counts.end(), 0);
    return error;
  }
  std::vector<std::int64_t> next(experts);
  std::int64_t rows = 0;
  for (std::int32_t e = 0; e < experts; ++e) next[e] = rows, rows += counts[e];
  tokens.resize(rows);
  row.assign(routes, -1);
  for (std::int64_t i = 0; i < routes; ++i) {
    if (expert_ids[i] < 0) continue;
    row[i] = next[expert_ids[i]]++;
    tokens[row[i]] = static_cast<std::int32_t>(i / topk);
  }
  return "";
}

}  // namespace tilemoe::cpu
