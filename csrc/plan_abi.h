// Plain structs shared by planner, kernels, CPU twin and Python (ds_tilemoe/plan_abi.py mirrors
// them; tests/test_plan_abi.py compares the two). No torch, CUDA or NVSHMEM header here.
//
// Words: docs of ds_tilemoe/layout.py. Bands are numbered in schedule order everywhere, so "band i"
// is the i-th band that the producer makes and the schedule needs no array of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define TILEMOE_HOST_DEVICE __host__ __device__
#else
#define TILEMOE_HOST_DEVICE
#endif

namespace tilemoe {

enum class Layout : int32_t { compact = 0, aligned = 1 };

// Everything a plan depends on besides the counts. All ranks of a group agree on every field but
// rank, bands_per_segment, local_tail_bands and chunk_rows, which only shape a rank's own sending.
struct PlanParams {
  int32_t world;          // W, ranks of the expert-parallel group
  int32_t rank;           // this rank inside the group
  int32_t local_experts;  // E_local; global expert = rank * E_local + local
  int32_t tile_m;         // rows of a band
  Layout layout;
  int32_t bands_per_segment;  // most bands of a middle segment (the paper's mgb), >= 1
  int32_t local_tail_bands;   // local bands that go last; -1 = all of them (the paper's rule)
  int32_t chunk_rows;         // most rows of a chunk, >= 1
};
static_assert(sizeof(PlanParams) == 32);

// Lengths of the arrays of one plan.
struct PlanSizes {
  int64_t rows;          // rows of the layout, padding included: a multiple of tile_m
  int64_t valid_rows;    // rows that carry a token
  int32_t bands;         // B
  int32_t remote_bands;  // bands with at least one remote row
  int32_t segments;
  int32_t chunks;
};
static_assert(sizeof(PlanSizes) == 32);

struct Band {
  int64_t row;     // first row in this rank's layout
  int32_t expert;  // local expert
  int32_t rows;    // valid rows; they are the first rows of the band
};
static_assert(sizeof(Band) == 16);

// Rows [src_row, src_row + rows) of this rank's GEMM 2 output go to rows [dst_row, ...) of the
// owner's receive buffer once bands [band_begin, band_begin + band_count) are ready.
struct Segment {
  int64_t src_row;
  int64_t dst_row;
  int32_t rows;
  int32_t owner;
  int32_t band_begin;
  int32_t band_count;
};
static_assert(sizeof(Segment) == 32);

// What one CTA (or consumer thread) claims: rows [row, row + rows) of a segment.
struct Chunk {
  int32_t segment;
  int32_t row;
  int32_t rows;
};
static_assert(sizeof(Chunk) == 12);

// A plan in caller-owned memory. Array lengths in brackets; counts C is [W, W * E_local].
struct PlanView {
  PlanSizes sizes;
  int64_t* expert_row;      // [E_local + 1] first layout row of each local expert, then rows
  int64_t* run_row;         // [E_local, W] first layout row of the run (local expert, owner)
  Band* bands;              // [bands]
  Segment* segments;        // [segments] in the order in which they become ready
  Chunk* chunks;            // [chunks] in segment order
  int64_t* arrival_target;  // [W] rows that this rank is owed by each rank; 0 for itself
  int64_t* dispatch_row;    // [E] first row of this rank's run in the layout of expert e's rank
  int64_t* recv_row;        // [E + 1] first row of expert e in this rank's receive buffer
};

// Nanoseconds of this rank's own clock since its producer started, and counts, of one iteration.
struct IterationStats {
  int64_t first_segment_ready;  // 0 if the rank has no segment
  int64_t producer_end;         // last GEMM 2 tile flagged, before any drain work
  int64_t last_put;             // last row shipped, by consumer or drain; 0 if none
  int64_t last_arrival;         // scale has seen all rows owed to this rank
  int64_t segments;
  int64_t backlog_at_producer_end;  // chunks ready and not yet shipped at producer_end
  int64_t chunks_drained;           // chunks shipped by the producer's drain role
  int64_t idle_spins;               // polls of a flag that was not yet up
  int64_t epoch;
};
static_assert(sizeof(IterationStats) == 72);

// Where a call's time goes: ns of this rank's own clock since its count exchange began; 0 where a
// kernel did not run. router_start is negative: the router runs before.
struct LayerTimes {
  int64_t router_start;
  int64_t exchange_end;  // counts are here and the plan is made
  int64_t front_start;   // GEMM 1's first tile or first row sent
  int64_t front_end;     // its last tile
  int64_t down_start;    // IterationStats counts from here
  int64_t down_end;
  int64_t last_arrival;
  int64_t scale_end;
};
static_assert(sizeof(LayerTimes) == 64);

// What a call leaves behind for the host, in slot `epoch % kCallRecords` of a page-locked ring.
// Written behind the end of the call, `epoch` last and released to the system: a slot whose epoch
// is the wanted one before and after reading holds that call, and nobody has to wait for the
// device.
constexpr int32_t kCallRecords = 256;
struct CallRecord {
  IterationStats iteration;
  LayerTimes times;
  uint64_t layer;         // fingerprint, as in ExchangeParams
  int64_t tokens;         // of this rank
  int64_t rows;           // valid rows of this rank's layout
  int64_t remote_rows;    // of them, owed to other ranks
  int32_t consumer_ctas;  // that were asked for in this call
  int32_t bands;          // of the plan
  uint64_t epoch;
};
static_assert(sizeof(CallRecord) == 184);

// Tile `claim` of `bands * n_tiles`: groups of `group_bands` bands one after another, inside a
// group the band index fastest, so that one weight tile serves the bands of a group from cache.
struct TileIndex {
  int32_t band;
  int32_t n_tile;
};
TILEMOE_HOST_DEVICE inline TileIndex tile_of_claim(int64_t claim, int32_t bands, int32_t n_tiles,
                                                   int32_t group_bands) {
  const int64_t tiles_per_group = static_cast<int64_t>(group_bands) * n_tiles;
  const int64_t group = claim / tiles_per_group;
  const int64_t first_band = group * group_bands;
  const int64_t left = bands - first_band;
  const int64_t in_group = left < group_bands ? left : group_bands;
  const int64_t within = claim - group * tiles_per_group;
  return {static_cast<int32_t>(first_band + within % in_group),
          static_cast<int32_t>(within / in_group)};
}

}  // namespace tilemoe
