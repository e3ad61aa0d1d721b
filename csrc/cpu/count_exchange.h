// The count exchange: each rank writes its row of C, or why it has none, into every block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "heap.h"
#include "watch.h"

namespace tilemoe::cpu {

// What a rank tells in one call.
struct CountNews {
  Word epoch;
  std::string layer;
  Word fingerprint;  // of the layer; equal on all ranks that run the same one
  std::int64_t tokens;
  const std::vector<std::int32_t>& counts;  // its row of C
  std::string error;                        // why it has no routing, or ""
};

// Sends `news` of `rank` to all blocks, its own too. Never waits.
void send_counts(const std::vector<Block>& blocks, int rank, const CountNews& news,
                 RandomDelay delay);

// Waits for all ranks' rows and returns C. `own` is this rank's block, `news` what it has sent.
// Every rank judges the same rows in the same order, so that all throw the same Error: a rank has
// no routing, runs another layer, or has more than `max_tokens`.
std::vector<std::int32_t> receive_counts(const Block& own, int world, const CountNews& news,
                                         std::int64_t max_tokens, std::int64_t timeout_ns,
                                         Watch& watch);

}  // namespace tilemoe::cpu
