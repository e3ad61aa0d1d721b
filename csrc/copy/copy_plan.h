// How copy engines bring a rank's rows back to their owners: which copies, and the bands that each
// waits for. Host only, from C alone; the band numbers are those of the device's plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../planner/host_plan.h"

namespace tilemoe {

// Rows that lie side by side in GEMM 2's output and in their owner's receive room.
struct RowRange {
  int64_t from;
  int64_t to;
  int64_t rows;
};

// What is waited for together and then copied.
struct EngineCopy {
  std::vector<int32_t> bands;  // ascending
  std::vector<RowRange> ranges;
  int64_t rows = 0;

  // Whether the ranges are the rows of a box: as long as each other and as far apart on both sides.
  bool is_box() const {
    for (size_t i = 1; i < ranges.size(); ++i) {
      const RowRange &first = ranges[0], &second = ranges[1], &mine = ranges[i],
                     &before = ranges[i - 1];
      if (mine.rows != first.rows || mine.from - before.from != second.from - first.from ||
          mine.to - before.to != second.to - first.to || mine.from < before.from + first.rows ||
          mine.to < before.to + first.rows) {
        return false;
      }
    }
    return ranges.size() > 1;
  }
};

// All copies for one owner, in the order in which their bands become ready.
struct PeerCopies {
  int32_t owner;
  int64_t rows = 0;
  std::vector<EngineCopy> copies;
};

// What the copies of a call follow from. bands and segments: of the whole plan, local bands too.
struct CopyPlan {
  int32_t bands = 0;
  int32_t segments = 0;
  std::vector<PeerCopies> peers;  // the next rank first; without those that are owed nothing
};

// At most `most` copies an owner, alike in rows, and fewer where they would be shorter than
// least_bytes. counts: C [W, E]. Throws what the planner throws.
inline CopyPlan plan_copies(PlanParams params, const int32_t* counts, int64_t row_bytes, int most,
                            int64_t least_bytes) {
  params.chunk_rows = INT32_MAX;  // nobody claims chunks: one a segment
  const HostPlan plan(params, counts);
  const std::vector<Segment>& segments = plan.segments;
  CopyPlan result{plan.sizes.bands, plan.sizes.segments, {}};
  for (int32_t place = 1; place < params.world; ++place) {
    PeerCopies peer{(params.rank + place) % params.world, 0, {}};
    int64_t all = 0;
    for (const Segment& s : segments) all += s.owner == peer.owner ? s.rows : 0;
    if (all == 0) continue;
    const int64_t count =
        std::max<int64_t>(1, std::min<int64_t>(most, all * row_bytes / least_bytes));
    int64_t last = -1;
    for (const Segment& s : segments) {
      if (s.owner != peer.owner) continue;
      const int64_t number = peer.rows * count / all;
      if (number != last) peer.copies.emplace_back();
      last = number;
      EngineCopy& copy = peer.copies.back();
      for (int32_t band = s.band_begin; band < s.band_begin + s.band_count; ++band) {
        if (copy.bands.empty() || copy.bands.back() < band) copy.bands.push_back(band);
      }
      const bool joins = !copy.ranges.empty() &&
                         copy.ranges.back().from + copy.ranges.back().rows == s.src_row &&
                         copy.ranges.back().to + copy.ranges.back().rows == s.dst_row;
      if (joins) {
        copy.ranges.back().rows += s.rows;
      } else {
        copy.ranges.push_back({s.src_row, s.dst_row, s.rows});
      }
      copy.rows += s.rows;
      peer.rows += s.rows;
    }
    result.peers.push_back(std::move(peer));
  }
  return result;
}

}  // namespace tilemoe
