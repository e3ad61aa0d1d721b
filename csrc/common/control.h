// Memory through which the kernels of a rank talk to each other and to those of its peers: one
// symmetric block a rank (equal offsets on each) and one local state a rank. Host and device.
//
// Reuse rule: a rank writes into a peer's block only after it has the peer's count row of this
// epoch, and a rank sends that row in stream order behind its own scale of the epoch before. Count
// rows themselves are written earlier, by peers at most one epoch ahead: C has two halves by epoch
// parity, and a ready word is waited for by equality. Arrival words and the counters of a rank's
// own kernels have two halves as well; the exchange of epoch e zeroes half e before it sends.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../plan_abi.h"
#include "integers.h"

namespace tilemoe {

constexpr int32_t kCountHalves = 2;
constexpr int32_t kMaxWorld = 72;  // ranks of a group; the shipping CTAs keep a sum for each
constexpr int64_t kLineBytes = 128;

// How a call ended; the worst comes last. All but ok make scale fill its output with NaN.
enum class Outcome : int32_t {
  ok = 0,
  rank_failure = 1,    // `peer` said so in its count row: it has no routing, or (`seen` > 0) it is
                       // the first of `seen` ranks whose layer has changed; the heap stays usable
  layer_mismatch = 2,  // `peer` runs another layer than rank 0; the heap stays usable
  capacity = 3,        // `peer` has `seen` tokens, the heap was made for `wanted`; stays usable
  deadline = 4,        // `rank` waited in vain; the group's heap is failed
  plan_overflow = 5,   // rank's plan arrays are too short for C; the group's heap is failed
  host_failure = 6,    // `rank`'s host failed between two launches of a call; the heap is failed
  out_of_step = 7,     // `rank` went on behind call `seen` before it had heard that this failed,
                       // by `peer` (State::unheard); the heap is failed
};

// What a passed deadline waited for; dispatch: rows of a slot in front of GEMM 1, `band` its
// number.
enum class Wait : int32_t { none = 0, counts = 1, band = 2, arrivals = 3, dispatch = 4 };

struct ErrorRecord {
  Outcome outcome;
  Wait wait;     // of a passed deadline
  int32_t rank;  // that found it
  int32_t peer;  // that it waited for, or that is at fault
  int64_t band;  // of Wait::band
  uint64_t seen;
  uint64_t wanted;
  uint64_t epoch;
  uint64_t layer;  // fingerprint, of a failure that leaves the heap usable; else 0
};
static_assert(sizeof(ErrorRecord) == 56);

// First word group of a block. The first rank that fails takes `claimed` and writes the record.
struct Failure {
  uint32_t claimed;
  uint32_t code;  // 0 = none; released after the record
  ErrorRecord record;
};

// One source rank's row of C: this, then its counts [max_experts] int32.
struct CountRow {
  uint64_t ready;  // the epoch
  uint64_t layer;  // fingerprint: ranks must run the same one
  int64_t tokens;
  int32_t status;  // 0; 1: this rank has no routing; 2: for its layer has changed
  int32_t unused;
};
static_assert(sizeof(CountRow) == 32);
constexpr int64_t count_row_bytes(int64_t experts) {
  return int64_t{sizeof(CountRow)} + int64_t{sizeof(int32_t)} * experts;
}

struct BlockShape {
  int32_t world;
  int32_t max_experts;     // E of the layer with most
  int32_t max_slots;       // tile_m-row slots of the longest layout: rows / tile_m
  int64_t recv_bytes;      // room for the rows that come back to a rank
  int64_t dispatch_bytes;  // room for the layout's rows in front of GEMM 1
};

// Byte offsets inside a block.
struct BlockOffsets {
  int64_t counts;
  int64_t count_row_bytes;
  int64_t arrivals;
  int64_t slot_rows;  // [2 halves][slot] uint32: rows that dispatch has brought into each slot
  int64_t slot_half_bytes;
  int64_t recv;
  int64_t dispatch;
  int64_t block_bytes;
};

inline BlockOffsets block_offsets(const BlockShape& shape) {
  BlockOffsets o{};
  o.counts = round_up(sizeof(Failure), kLineBytes);
  o.count_row_bytes = round_up(count_row_bytes(shape.max_experts), kLineBytes);
  o.arrivals = o.counts + kCountHalves * shape.world * o.count_row_bytes;
  o.slot_rows = o.arrivals + 2 * shape.world * kLineBytes;
  o.slot_half_bytes = round_up(shape.max_slots * int64_t{sizeof(uint32_t)}, kLineBytes);
  o.recv = o.slot_rows + 2 * o.slot_half_bytes;
  // TMA wants its operand at a multiple of 16 bytes; a page keeps the rows' lines whole.
  o.dispatch = round_up(o.recv + shape.recv_bytes, 4096);
  o.block_bytes = round_up(o.dispatch + shape.dispatch_bytes, 4096);
  return o;
}

// What a call's record tells of the call itself. Writer: thread 0 of its exchange.
struct CallFacts {
  uint64_t layer;
  int64_t tokens;
  int64_t rows;         // valid rows of the layout
  int64_t remote_rows;  // of them, owed to other ranks
  uint64_t router_start_ns;
  uint64_t exchange_start_ns;
  uint64_t exchange_end_ns;
  int32_t segments;
  int32_t bands;
  int32_t consumer_ctas;
};

// Counters and times of one epoch; band flags follow. Words that many CTAs add to have a line each.
struct Half {
  alignas(128) uint32_t front_claim;      // tiles of GEMM 1
  alignas(128) uint32_t dispatch_ticket;  // CTAs of GEMM 1 in the order of their start
  alignas(128) uint32_t dispatch_claim;   // pieces of rows for peers
  alignas(128) uint32_t gather_claim;     // pieces of rows for this rank itself
  alignas(128) uint32_t tile_claim;       // tiles of GEMM 2
  alignas(128) uint32_t chunk_claim;
  alignas(128) uint32_t chunks_shipped;
  alignas(128) uint32_t tiles_flagged;
  uint32_t chunks_drained;
  uint32_t backlog;  // at producer end
  uint64_t idle_spins;
  uint64_t front_start_ns;
  uint64_t front_end_ns;
  uint64_t start_ns;
  uint64_t end_ns;
  uint64_t first_ready_ns;
  uint64_t last_put_ns;
  alignas(128) uint32_t scale_finished;  // CTAs of scale; from bit 16 on, those without their rows
  uint64_t last_arrival_ns;              // by scale's first CTA
  uint64_t scale_end_ns;                 // by its last one; 0: no scale, and no record
  alignas(128) CallFacts facts;
};

// What the planner tells the kernels behind it, in front of the two halves. Zeroed once, when made.
struct State {
  uint64_t epoch;  // of the call at hand; the exchange advances it, so graphs replay
  Outcome outcome;
  int32_t bands;  // 0 where the call failed, whatever the plan says
  int32_t chunks;
  int32_t segments;
  int32_t consumer_ctas;     // asked for in this call; see ExchangeParams
  uint64_t router_start_ns;  // written by the router before the call's exchange; 0 = none ran
  // Exchanges before, and the epoch whose record has gone to the host last. Of the CTA that ships
  // records alone: it runs beside the one that advances `epoch`.
  uint64_t exchanges;
  uint64_t recorded;
  // Epoch of a call that the count exchange has ended (the heap stays usable) and of which the host
  // has been told but has not said that it has heard; 0 = none. A call that finds it was queued
  // before the host knew. The rank at fault may not come to that call, and the host may be in a
  // copy behind it, where it looks at nothing: so the device fails the group, and nobody waits.
  // Writer: thread 0 of the exchange; the host, in stream order, once nothing of this rank is
  // queued (tilemoe_say_heard). Reader: the next exchange. Scope and order: the
  // stream's. Not a page-locked word: what the host writes there says nothing about what it had
  // queued by then, replays of a graph above all.
  uint64_t unheard;
  int32_t unheard_peer;  // by which it failed, where there is one; likewise
};
static_assert(sizeof(State) <= kLineBytes);

inline int64_t half_bytes(int32_t max_bands) {
  return round_up(sizeof(Half) + max_bands * int64_t{sizeof(uint32_t)}, kLineBytes);
}
inline int64_t state_bytes(int32_t max_bands) { return kLineBytes + 2 * half_bytes(max_bands); }

// A rank's view of its group: by value in the params of every kernel.
struct RankView {
  int32_t world;
  int32_t rank;
  BlockOffsets offsets;
  std::byte* const* blocks;  // device, [W]: address of each rank's block on this device
  std::byte* state;          // device: State, then the halves
  int64_t half_bytes;
  int64_t wait_timeout_ns;
  ErrorRecord* host_error;   // page-locked, as the device sees it; or null
  uint32_t random_delay_ns;  // tests only: most that a role sleeps where kernels could meet
};

// In a block: the word that counts the rows which `source` has put into its receive room.
TILEMOE_HOST_DEVICE inline int64_t arrival_offset(const RankView& view, uint64_t epoch,
                                                  int32_t source) {
  const int64_t line = static_cast<int64_t>(epoch % 2) * view.world + source;
  return view.offsets.arrivals + line * kLineBytes;
}

TILEMOE_HOST_DEVICE inline std::byte* half_of(const RankView& view, uint64_t epoch) {
  return view.state + kLineBytes + static_cast<int64_t>(epoch % 2) * view.half_bytes;
}

}  // namespace tilemoe
