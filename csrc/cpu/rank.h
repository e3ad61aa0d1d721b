// One rank of the CPU twin: the tile protocol of one expert-parallel group, call by call.
//
// A layer's forward is begin -> dispatch -> wait_expert (each) -> combine -> scale, in this order
// on one thread. Consumers run beside combine on threads of their own. No shortcut: rows travel
// only through the heap, readiness only through flags.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../plan_abi.h"
#include "heap.h"
#include "numeric.h"
#include "routes.h"
#include "watch.h"
#include "workers.h"

namespace tilemoe::cpu {

struct RankConfig {
  HeapShape heap;
  std::int32_t rank;
  std::byte* region;               // world blocks; zeroed before the first rank starts
  std::int64_t max_tokens;         // what the heap was made for
  std::int64_t wait_timeout_ns;    // once a peer has arrived in a call
  std::int64_t group_timeout_ns;   // for a peer that has not: slow is not dead
  std::vector<std::int64_t> pids;  // [world] of the ranks' processes, 0 = do not watch; or empty
};

struct Layer {
  const char* name;
  Word fingerprint;  // equal on all ranks that run the same layer
  std::int32_t topk;
  std::int64_t in_row_bytes;   // of the rows that are dispatched
  std::int64_t out_row_bytes;  // of the rows that come back
  PlanParams plan;
};

// One tile for the caller's GEMM: c[m, n] = a[m, k] * b[n, k]^T + bias[n], all row-major.
struct GemmTile {
  const std::byte* a;
  const std::byte* b;
  const std::byte* bias;  // null = none
  std::byte* c;
  std::int64_t ldc;  // elements between rows of c
  std::int32_t m, n, k;
};

enum class Mover : std::int32_t {
  consumer = 0,    // consumer threads beside the producer, the drain for the rest
  none = 1,        // the drain ships everything after the last tile
  sequential = 2,  // consumer threads start after the last tile, no drain: for measuring
};

struct CombineArgs {
  const std::byte* hidden;               // [plan rows, K]
  std::byte* out;                        // [plan rows, N]
  std::vector<const std::byte*> weight;  // per local expert [N, K]
  std::vector<const std::byte*> bias;    // per local expert [N] or null
  DType dtype;
  std::int32_t n, k, tile_n, group_bands;
  std::int32_t num_consumers;
  Mover mover;
  std::function<void(const GemmTile&)> gemm;
};

class Rank {
 public:
  explicit Rank(RankConfig config);

  // Count exchange and plan. `routing_error` non-null: this rank has no routing; all ranks throw.
  // expert_ids: [tokens, topk], -1 = dropped. Throws Error.
  void begin(const Layer& layer, const std::int32_t* expert_ids, std::int64_t tokens,
             const char* routing_error);
  // Sends this rank's rows x [tokens, in_row_bytes] to their places; sending never waits.
  void dispatch(const std::byte* x);
  // Returns when every row of the local expert has come into dispatch_buffer().
  void wait_expert(std::int32_t local_expert);
  void combine(const CombineArgs& args);
  // y [tokens, n] = sum over k of weights [tokens, topk] * row, fp32, k ascending, one cast.
  void scale(const float* weights, std::byte* y, DType dtype);
  // Marks the group failed in every block: peers stop waiting. This rank's first cause stays.
  void fail(const std::string& cause) { watch_.fail(cause); }
  // Fills the rooms that peers write to with NaN. Tests only; between calls, when nobody writes.
  void poison();

  const PlanView& plan() const { return plan_; }
  std::byte* dispatch_buffer() const { return own().dispatch(); }
  const IterationStats& stats() const { return stats_; }
  // The earliest cause of failure that this rank can see, or "".
  std::string failure() const { return watch_.failure(); }

  // Called about every 50 ms by waits of the calling thread; true ends the wait.
  std::function<bool()> interrupted = [] { return false; };
  std::int64_t random_delay_us = 0;  // tests only
  std::uint64_t random_delay_seed = 1;

 private:
  struct Consumed {
    std::int64_t last_put = 0, chunks = 0, spins = 0;
  };

  const Block& own() const { return blocks_[config_.rank]; }
  void make_plan();
  void check_capacity();
  Consumed consume(const CombineArgs& args, Role role, std::uint64_t seed);
  void produce(const CombineArgs& args);
  template <class T>
  void sum_rows(const float* weights, T* y) const;

  RankConfig config_;
  std::vector<Block> blocks_;
  Watch watch_;
  Workers workers_;

  Word epoch_ = 0;
  Layer layer_{};
  std::int64_t tokens_ = 0;
  Routes routes_;
  std::vector<std::int32_t> counts_;  // C, copied once an epoch

  PlanView plan_{};
  std::vector<std::int64_t> plan_words_;
  std::vector<Band> bands_;
  std::vector<Segment> segments_;
  std::vector<Chunk> chunks_;

  // Flags and claims of this rank's own threads; one half an epoch, as on the device.
  std::vector<Word> band_ready_[kHalves];
  Word tile_claim_[kHalves] = {}, chunk_claim_[kHalves] = {};
  Word shipped_ = 0;

  const std::byte* out_ = nullptr;
  std::int64_t start_ns_ = 0;
  IterationStats stats_{};
};

}  // namespace tilemoe::cpu
