// Where this rank's tokens go in one call: its row of C, and the rows that come back for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tilemoe::cpu {

struct Routes {
  std::vector<std::int32_t> counts;  // this rank's row of C: kept routes of each expert
  std::vector<std::int32_t> tokens;  // of each receive row: by expert, then by (token, k)
  std::vector<std::int32_t> expert;  // [tokens, topk] or -1
  std::vector<std::int64_t> row;     // [tokens, topk] receive row or -1

  // Reads expert_ids [tokens, topk], -1 = dropped. Returns what is wrong with them, or ""; all
  // counts are 0 then.
  std::string read(const std::int32_t* expert_ids, std::int64_t tokens, std::int32_t topk,
                   std::int32_t experts);

 private:
  // As read, for counts alone.
  std::string count(const std::int32_t* expert_ids, std::int64_t tokens, std::int32_t topk);
};

}  // namespace tilemoe::cpu
