// The plan of planner.cpp in closed form, so that every expert, band, run, segment and chunk is one
// thread's work: who comes before it is a prefix sum, what it belongs to a binary search in that
// sum. Words and order: plan_abi.h and planner.cpp, with which this is bit-equal
// (planner_check.cu).
//
// Rows are 32-bit inside, as TMA coordinates are; the arrays of the plan hold 64-bit rows.
#pragma once

#include <cstdint>

#include "../common/integers.h"
#include "../common/warp.cuh"
#include "plan_device.h"

namespace tilemoe::plan {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// Shared memory. Arrays over experts are in schedule order where they say so.
struct Shared {
  int32_t warp_sums[2][kWarps];
  int32_t prefix[kThreads];        // of the runs of a pass: segments before each
  int32_t chunk_prefix[kThreads];  // of the segments of a pass: chunks before each
  int32_t segment_rows[kThreads];
  int32_t row[kPlanMaxLocalExperts];     // by id
  int32_t valid[kPlanMaxLocalExperts];   // by id
  int32_t bands[kPlanMaxLocalExperts];   // by id
  int32_t remote[kPlanMaxLocalExperts];  // by id
  int32_t local[kPlanMaxLocalExperts];   // by id: bands without a remote row in the ids before
  int32_t order[kPlanMaxLocalExperts];   // ids in schedule order
  int32_t head[kPlanMaxLocalExperts];    // schedule order: number of its first remote band
  int32_t tail[kPlanMaxLocalExperts];    // schedule order: number of its first held-back band
  int32_t valid_rows;
  int32_t remote_rows;  // of the valid ones
  int32_t last_remote_band;
  int32_t counts[1];  // [W, W * E_local], then recv_row [W, E_local] of this rank's experts
};

inline size_t shared_bytes(const PlanParams& p) {
  const size_t experts = static_cast<size_t>(p.world) * p.local_experts;
  return sizeof(Shared) + sizeof(int32_t) * (p.world * experts + experts);
}

inline bool valid(const PlanParams& p) {
  return p.world >= 1 && p.rank >= 0 && p.rank < p.world && p.local_experts >= 1 &&
         p.local_experts <= kPlanMaxLocalExperts && p.tile_m >= 1 && p.bands_per_segment >= 1 &&
         p.local_tail_bands >= -1 && p.chunk_rows >= 1 &&
         (p.layout == Layout::compact || p.layout == Layout::aligned);
}

// Sum over the threads before this one; *total over all. Two scans in a row have different turns.
__device__ __forceinline__ int32_t scan(Shared& shared, int turn, int32_t value, int32_t* total) {
  return cta_scan<kThreads>(value, shared.warp_sums[turn], total);
}

// Last i < length with prefix[i] <= at: the nonempty piece that holds element `at`.
__device__ __forceinline__ int32_t find_piece(const int32_t* prefix, int32_t length, int32_t at) {
  int32_t low = 0;
  int32_t high = length;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (prefix[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

struct Run {
  int32_t expert;      // id
  int32_t first_band;  // of the expert, schedule number
  int32_t owner;
  int32_t begin;  // rows from the expert's first row
  int32_t rows;
};

// Bands [from, to) of a run's expert that one segment waits for, counted from the expert's first.
struct Cut {
  int32_t from;
  int32_t to;
};

// A run's bands cut into segments: the rank's first and last remote band alone, others joined.
struct Cuts {
  int32_t from;
  int32_t to;
  int32_t joined_to;  // [from + has_first, joined_to) is cut every `step`
  int32_t step;       // bands_per_segment, but at most the run's: no sum with it overflows
  int32_t has_first;
  int32_t joined;
  int32_t count;

  __device__ Cuts(const Run& run, const PlanParams& p, int32_t last_remote_band) {
    from = run.begin / p.tile_m;
    to = ceil_div(run.begin + run.rows, p.tile_m);
    has_first = run.first_band + from == 0 ? 1 : 0;
    const bool has_last = run.first_band + to - 1 == last_remote_band && to - from > has_first;
    joined_to = has_last ? to - 1 : to;
    step = min(p.bands_per_segment, to - from);
    joined = ceil_div(joined_to - from - has_first, step);
    count = has_first + joined + (has_last ? 1 : 0);
  }
  __device__ Cut at(int32_t i) const {
    if (i < has_first) return {from, from + 1};
    if (i - has_first == joined) return {to - 1, to};
    const int32_t begin = from + has_first + (i - has_first) * step;
    return {begin, min(begin + step, joined_to)};
  }
};

class Planner {
 public:
  __device__ Planner(const PlanKernelParams& k, Shared& shared)
      : k_(k),
        p_(k.params),
        s_(shared),
        experts_(p_.world * p_.local_experts),
        recv_row_(shared.counts + p_.world * experts_) {}

  // All threads; shared.counts is filled in and they have met since.
  __device__ void make() {
    if (threadIdx.x == 0) s_.last_remote_band = -1;  // read behind the next barrier
    for (int32_t task = threadIdx.x / 32; task < 2 * p_.world; task += kWarps) {
      if (task < p_.world) {
        lay_out(task);
      } else {
        place_receives(task - p_.world);
      }
    }
    __syncthreads();
    order_experts();
    number_bands();
    write_bands();
    write_segments();
  }

  // The same in all threads, behind make().
  __device__ const PlanSizes& sizes() const { return sizes_; }
  __device__ bool fits() const {
    return sizes_.rows <= k_.capacity.rows && sizes_.bands <= k_.capacity.bands &&
           sizes_.segments <= k_.capacity.segments && sizes_.chunks <= k_.capacity.chunks;
  }
  __device__ int32_t remote_rows() const { return s_.remote_rows; }

 private:
  __device__ int32_t count(int32_t source, int32_t rank, int32_t local) const {
    return s_.counts[source * experts_ + rank * p_.local_experts + local];
  }
  __device__ int32_t room(int32_t rows) const {
    return p_.layout == Layout::aligned ? ceil_div(rows, p_.tile_m) * p_.tile_m : rows;
  }
  __device__ int32_t owner_at(int32_t rank, int32_t place) const {
    const int32_t owner = rank + 1 + place;
    return owner < p_.world ? owner : owner - p_.world;
  }

  // One warp: the layout of `rank`, a lane an expert. Of other ranks only this rank's runs matter.
  __device__ void lay_out(int32_t rank) {
    const int lane = threadIdx.x % 32;
    const bool own = rank == p_.rank;
    int32_t first_row = 0;
    int32_t owed = 0;
    int32_t valid_rows = 0;
    int32_t local_rows = 0;
    int32_t local_bands = 0;
    for (int32_t base = 0; base < p_.local_experts; base += 32) {
      const int32_t local = base + lane;
      const bool here = local < p_.local_experts;
      int32_t end = 0, my_run = 0, valid = 0, remote = 0;
      for (int32_t place = 0; here && place < p_.world; ++place) {
        const int32_t owner = owner_at(rank, place);
        const int32_t rows = count(owner, rank, local);
        if (owner == p_.rank) my_run = end, owed += rows;
        if (place == p_.world - 1) remote = ceil_div(end, p_.tile_m), local_rows += rows;
        valid += rows;
        end += room(rows);
      }
      const int32_t bands = ceil_div(end, p_.tile_m);
      const int32_t through = warp_scan(bands * p_.tile_m);
      const int32_t row = first_row + through - bands * p_.tile_m;
      first_row += __shfl_sync(kAllLanes, through, 31);
      const int32_t local_through = local_bands + warp_scan(bands - remote);
      local_bands = __shfl_sync(kAllLanes, local_through, 31);
      if (!here) continue;
      k_.view.dispatch_row[rank * p_.local_experts + local] = row + my_run;
      if (!own) continue;
      k_.view.expert_row[local] = row;
      s_.row[local] = row;
      s_.valid[local] = valid;
      s_.bands[local] = bands;
      s_.remote[local] = remote;
      s_.local[local] = local_through - (bands - remote);
      valid_rows += valid;
      for (int32_t place = 0, at = row; place < p_.world; ++place) {
        const int32_t owner = owner_at(rank, place);
        k_.view.run_row[local * p_.world + owner] = at;
        at += room(count(owner, rank, local));
      }
    }
    owed = __reduce_add_sync(kAllLanes, owed);
    valid_rows = __reduce_add_sync(kAllLanes, valid_rows);
    local_rows = __reduce_add_sync(kAllLanes, local_rows);
    if (lane != 0) return;
    k_.view.arrival_target[rank] = own ? 0 : owed;
    if (own) {
      s_.valid_rows = valid_rows;
      s_.remote_rows = valid_rows - local_rows;
      k_.view.expert_row[p_.local_experts] = first_row;
    }
  }

  // One warp: where the rows of each expert begin in the receive buffer of `owner`.
  __device__ void place_receives(int32_t owner) {
    const int lane = threadIdx.x % 32;
    const int32_t first_own = p_.rank * p_.local_experts;
    int32_t first_row = 0;
    for (int32_t base = 0; base < experts_; base += 32) {
      const int32_t expert = base + lane;
      const bool here = expert < experts_;
      const int32_t rows = here ? s_.counts[owner * experts_ + expert] : 0;
      const int32_t through = warp_scan(rows);
      const int32_t row = first_row + through - rows;
      first_row += __shfl_sync(kAllLanes, through, 31);
      if (!here) continue;
      if (owner == p_.rank) k_.view.recv_row[expert] = row;
      const int32_t local = expert - first_own;
      if (local >= 0 && local < p_.local_experts) {
        recv_row_[owner * p_.local_experts + local] = row;
      }
    }
    if (owner == p_.rank && lane == 0) k_.view.recv_row[experts_] = first_row;
  }

  // Most remote bands first, ties by lower id; a rank by counting who goes before.
  __device__ void order_experts() {
    const int32_t id = threadIdx.x;
    if (id < p_.local_experts) {
      const int32_t mine = s_.remote[id];
      int32_t before = 0;
      for (int32_t other = 0; other < p_.local_experts; ++other) {
        const int32_t theirs = s_.remote[other];
        before += theirs > mine || (theirs == mine && other < id) ? 1 : 0;
      }
      s_.order[before] = id;
    }
    __syncthreads();
  }

  // An expert's remote bands and then its local ones, the last local_tail_bands of that walk apart.
  __device__ void number_bands() {
    const int32_t i = threadIdx.x;  // in schedule order
    const bool here = i < p_.local_experts;
    const int32_t id = here ? s_.order[i] : 0;
    const int32_t remote = here ? s_.remote[id] : 0;
    const int32_t local = here ? s_.bands[id] - remote : 0;
    int32_t all_local, heads, tails, all_remote;
    const int32_t local_before = scan(s_, 0, local, &all_local);
    const int32_t tail = p_.local_tail_bands < 0 ? all_local : min(p_.local_tail_bands, all_local);
    const int32_t kept = min(max(all_local - tail - local_before, 0), local);
    const int32_t head = scan(s_, 1, remote + kept, &heads);
    const int32_t back = scan(s_, 0, local - kept, &tails);
    scan(s_, 1, remote, &all_remote);
    if (here) {
      s_.head[i] = head;
      s_.tail[i] = heads + back;
      if (remote > 0) atomicMax(&s_.last_remote_band, head + remote - 1);
    }
    heads_ = heads;
    sizes_ = {};
    sizes_.bands = heads + tails;
    sizes_.rows = static_cast<int64_t>(sizes_.bands) * p_.tile_m;
    sizes_.valid_rows = s_.valid_rows;
    sizes_.remote_bands = all_remote;
    __syncthreads();
  }

  __device__ void write_bands() {
    const int32_t bands = min(sizes_.bands, k_.capacity.bands);
    for (int32_t number = threadIdx.x; number < bands; number += kThreads) {
      const bool in_head = number < heads_;
      const int32_t i = find_piece(in_head ? s_.head : s_.tail, p_.local_experts, number);
      const int32_t id = s_.order[i];
      // Held-back bands are the last of their expert.
      const int32_t held_back =
          (i + 1 < p_.local_experts ? s_.tail[i + 1] : sizes_.bands) - s_.tail[i];
      const int32_t band =
          in_head ? number - s_.head[i] : number - s_.tail[i] + s_.bands[id] - held_back;
      k_.view.bands[number] = {int64_t{s_.row[id]} + band * p_.tile_m, id, valid_in(id, band)};
      if (k_.front_bands == nullptr) continue;
      const int32_t at = front_at(id, band);
      if (at < k_.capacity.bands) k_.front_bands[at] = number;
    }
  }

  // GEMM 1's order: first as many bands without a remote row as are held back, which wait for no
  // peer, and then all others, both by id and in the order of their rows.
  __device__ int32_t front_at(int32_t id, int32_t band) const {
    const int32_t first = sizes_.bands - heads_;
    const int32_t local_band =
        s_.local[id] + band - s_.remote[id];  // of all local ones, if it is one
    if (band >= s_.remote[id] && local_band < first) return local_band;
    // In front of it are all first ones and, of the bands of lower rows, those that are not.
    const int32_t lower = s_.row[id] / p_.tile_m + band;
    const int32_t lower_first = min(first, band < s_.remote[id] ? s_.local[id] : local_band);
    return first + lower - lower_first;
  }

  __device__ int32_t valid_in(int32_t id, int32_t band) const {
    if (p_.layout == Layout::compact) return min(p_.tile_m, s_.valid[id] - band * p_.tile_m);
    int32_t begin = 0;
    for (int32_t place = 0; place < p_.world; ++place) {
      const int32_t rows = count(owner_at(p_.rank, place), p_.rank, id);
      const int32_t in_run = band * p_.tile_m - begin;
      if (in_run < rows) return min(p_.tile_m, rows - in_run);
      begin += room(rows);
    }
    return 0;
  }

  // Remote run number q: expert by expert in schedule order, inside by place.
  __device__ Run run_at(int32_t q) const {
    const int32_t i = q / (p_.world - 1);
    const int32_t place = q - i * (p_.world - 1);
    Run run{s_.order[i], s_.head[i], owner_at(p_.rank, place), 0, 0};
    for (int32_t before = 0; before < place; ++before) {
      run.begin += room(count(owner_at(p_.rank, before), p_.rank, run.expert));
    }
    run.rows = count(run.owner, p_.rank, run.expert);
    return run;
  }

  // Passes over up to kThreads runs, inside over up to kThreads of their segments.
  __device__ void write_segments() {
    const int32_t runs = p_.local_experts * (p_.world - 1);
    for (int32_t first_run = 0; first_run < runs; first_run += kThreads) {
      const int32_t q = first_run + threadIdx.x;
      int32_t cuts = 0;
      if (q < runs) {
        const Run run = run_at(q);
        if (run.rows > 0) cuts = Cuts(run, p_, s_.last_remote_band).count;
      }
      int32_t pass_segments;
      s_.prefix[threadIdx.x] = scan(s_, 0, cuts, &pass_segments);
      __syncthreads();
      for (int32_t first = 0; first < pass_segments; first += kThreads) {
        write_segment_pass(first_run, first, pass_segments);
      }
      sizes_.segments += pass_segments;
    }
  }

  __device__ void write_segment_pass(int32_t first_run, int32_t first, int32_t pass_segments) {
    const int32_t here = min(pass_segments - first, kThreads);
    const int32_t base = sizes_.segments + first;
    int32_t chunks = 0;
    if (threadIdx.x < here) {
      const int32_t in_pass = first + threadIdx.x;
      const int32_t slot = find_piece(s_.prefix, kThreads, in_pass);
      const Run run = run_at(first_run + slot);
      const Cut cut = Cuts(run, p_, s_.last_remote_band).at(in_pass - s_.prefix[slot]);
      const int32_t from_row = max(run.begin, cut.from * p_.tile_m);
      const int32_t rows = min(run.begin + run.rows, cut.to * p_.tile_m) - from_row;
      const int64_t recv_row = recv_row_[run.owner * p_.local_experts + run.expert];
      if (base + static_cast<int32_t>(threadIdx.x) < k_.capacity.segments) {
        k_.view.segments[base + threadIdx.x] = {int64_t{s_.row[run.expert]} + from_row,
                                                recv_row + (from_row - run.begin),
                                                rows,
                                                run.owner,
                                                run.first_band + cut.from,
                                                cut.to - cut.from};
      }
      s_.segment_rows[threadIdx.x] = rows;
      chunks = ceil_div(rows, p_.chunk_rows);
    }
    int32_t pass_chunks;
    s_.chunk_prefix[threadIdx.x] = scan(s_, 1, chunks, &pass_chunks);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < pass_chunks; i += kThreads) {
      const int32_t slot = find_piece(s_.chunk_prefix, here, i);
      const int32_t begin = s_.chunk_prefix[slot];
      const int32_t rows = s_.segment_rows[slot];
      const int32_t pieces = ceil_div(rows, p_.chunk_rows);
      const int32_t size = rows / pieces;
      const int32_t longer = rows - size * pieces;  // the first ones have a row more
      const int32_t at = i - begin;
      if (sizes_.chunks + i < k_.capacity.chunks) {
        k_.view.chunks[sizes_.chunks + i] = {base + slot, at * size + min(at, longer),
                                             size + (at < longer ? 1 : 0)};
      }
    }
    sizes_.chunks += pass_chunks;
    __syncthreads();  // the next pass writes the prefixes again
  }

  const PlanKernelParams& k_;
  const PlanParams& p_;
  Shared& s_;
  const int32_t experts_;
  int32_t* const recv_row_;
  int32_t heads_ = 0;  // bands before the held-back local ones
  PlanSizes sizes_{};
};

}  // namespace tilemoe::plan
