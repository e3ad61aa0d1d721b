// The symmetric heap of the CPU twin: one shared region, one block a rank, equal offsets in each.
// Its own layout, not that of common/control.h: there kernels tell causes by number, where ranks
// here write words, and count rows into slots of tile_m rows, where here each run has a counter.
//
// Reuse rule: a rank writes into a peer's block only after it has the peer's count row of this
// epoch, and a rank sends that row only after its own scale of the epoch before. Count rows
// themselves are written earlier, so C has two halves by epoch parity: a peer can be one epoch
// ahead, never two, since epoch e + 1 waits for this rank's count row of e + 1.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "../common/sync.h"

namespace tilemoe::cpu {

struct HeapShape {
  std::int32_t world;
  std::int32_t max_experts;     // E of the layer with most
  std::int64_t dispatch_bytes;  // room for the rows that peers send to a rank
  std::int64_t recv_bytes;      // room for the rows that come back to a rank
};

enum class Status : std::int32_t { ok = 0, failed = 1 };

// One source rank's row of C and what else its peers must know before any row travels.
struct CountRow {
  Word ready;  // the epoch; waited for by equality, so a stale half never passes
  Word layer;  // fingerprint of the layer: ranks must run the same one
  std::int64_t tokens;
  Status status;
  char message[1024];  // why, if failed; always terminated
};

// Why one rank gave up. Each rank has a slot of its own in every block, so writers never meet.
struct Failure {
  Word time_ns;  // of the host's monotonic clock, 0 = none; released after the message
  char message[1024];
};

// Copies a message into a fixed field, cut at a whole UTF-8 character.
template <std::size_t N>
void copy_message(const std::string& from, char (&to)[N]) {
  std::size_t n = std::min(from.size(), N - 1);
  if (n < from.size()) {
    while (n > 0 && (static_cast<unsigned char>(from[n]) & 0xc0u) == 0x80u) --n;
  }
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

inline constexpr int kHalves = 2;
inline constexpr int kCountHalves = kFault == Fault::one_count_half ? 1 : 2;
inline constexpr std::size_t kLine = 64;

// Byte offsets inside a block, the same on every rank.
struct HeapOffsets {
  std::size_t counts, count_row_bytes, runs, arrivals, dispatch, recv, block_bytes;
};
HeapOffsets heap_offsets(const HeapShape& shape);

// One rank's view of one block.
class Block {
 public:
  Block() = default;
  Block(std::byte* base, const HeapShape& shape, const HeapOffsets& offsets)
      : base_(base), shape_(shape), offsets_(offsets) {}

  // Set once any slot is: what waits look at.
  Word& failed() const { return *reinterpret_cast<Word*>(base_); }
  Failure& failure(int source) const { return reinterpret_cast<Failure*>(base_ + kLine)[source]; }
  CountRow& count_row(Word epoch, int source) const {
    return *reinterpret_cast<CountRow*>(row_base(epoch, source));
  }
  std::int32_t* counts(Word epoch, int source) const {
    return reinterpret_cast<std::int32_t*>(row_base(epoch, source) + sizeof(CountRow));
  }
  // Rows of run (local expert, source) that have come; at most max_experts words a half.
  Word& run(Word epoch, int local_expert, int source) const {
    const auto half = static_cast<std::size_t>(epoch % kHalves) * shape_.max_experts;
    return words(offsets_.runs)[half + local_expert * shape_.world + source];
  }
  Word& arrival(Word epoch, int source) const {
    const auto half = static_cast<std::size_t>(epoch % kHalves) * shape_.world;
    return words(offsets_.arrivals)[(half + source) * (kLine / sizeof(Word))];
  }
  std::byte* dispatch() const { return base_ + offsets_.dispatch; }
  std::byte* recv() const { return base_ + offsets_.recv; }

 private:
  Word* words(std::size_t offset) const { return reinterpret_cast<Word*>(base_ + offset); }
  std::byte* row_base(Word epoch, int source) const {
    const auto half = static_cast<std::size_t>(epoch % kCountHalves) * shape_.world;
    return base_ + offsets_.counts + (half + source) * offsets_.count_row_bytes;
  }

  std::byte* base_ = nullptr;
  HeapShape shape_{};
  HeapOffsets offsets_{};
};

inline HeapOffsets heap_offsets(const HeapShape& shape) {
  const auto round_up = [](std::size_t n, std::size_t to) { return (n + to - 1) / to * to; };
  HeapOffsets o{};
  std::size_t at = kLine + round_up(shape.world * sizeof(Failure), kLine);
  o.count_row_bytes = round_up(sizeof(CountRow) + shape.max_experts * sizeof(std::int32_t), kLine);
  o.counts = at;
  at += kCountHalves * shape.world * o.count_row_bytes;
  o.runs = at;
  at += round_up(kHalves * shape.max_experts * sizeof(Word), kLine);
  o.arrivals = at;
  at += kHalves * shape.world * kLine;
  o.dispatch = at;
  at += round_up(shape.dispatch_bytes, kLine);
  o.recv = at;
  at += round_up(shape.recv_bytes, kLine);
  o.block_bytes = round_up(at, 4096);
  return o;
}

}  // namespace tilemoe::cpu
