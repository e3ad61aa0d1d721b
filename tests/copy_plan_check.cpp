// The copies of csrc/copy/copy_plan.h against the segments of the host planner, for random counts.
// copy_plan_check CALLS SEED: 0 if every row of every rank goes once, behind all of its bands.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "copy/copy_plan.h"

using namespace tilemoe;

#define WANT(holds)                                                  \
  if (!(holds)) {                                                    \
    std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #holds); \
    return false;                                                    \
  }

namespace {

bool check(PlanParams params, const std::vector<int32_t>& counts, int64_t row_bytes, int most,
           int64_t least_bytes, int64_t* boxes) {
  const CopyPlan plan = plan_copies(params, counts.data(), row_bytes, most, least_bytes);
  const HostPlan whole(params, counts.data());
  WANT(plan.bands == whole.sizes.bands && plan.segments == whole.sizes.segments);
  std::set<int32_t> owners;
  std::set<int64_t> sent;  // (owner, row there)
  for (const PeerCopies& peer : plan.peers) {
    WANT(peer.owner != params.rank && owners.insert(peer.owner).second);
    PlanParams theirs = params;
    theirs.rank = peer.owner;
    WANT(HostPlan(theirs, counts.data()).arrival_target[params.rank] == peer.rows && peer.rows > 0);
    WANT(!peer.copies.empty() && peer.copies.size() <= static_cast<size_t>(most));
    int64_t rows = 0;
    for (const EngineCopy& copy : peer.copies) {
      int64_t here = 0;
      for (const RowRange& range : copy.ranges) {
        for (int64_t i = 0; i < range.rows; ++i) {
          WANT(sent.insert((range.to + i) * params.world + peer.owner).second);
        }
        here += range.rows;
      }
      WANT(here == copy.rows && here > 0);
      WANT(copy.bands.size() == std::set<int32_t>(copy.bands.begin(), copy.bands.end()).size());
      for (int32_t band : copy.bands) WANT(0 <= band && band < plan.bands);
      if (copy.is_box()) ++*boxes;
      rows += here;
    }
    WANT(rows == peer.rows);
    WANT(peer.copies.size() == 1 || rows * row_bytes >= int64_t(peer.copies.size()) * least_bytes);
  }
  // Every row of every segment goes from where it lies, and its copy waits for its bands.
  size_t rows = 0;
  for (const Segment& s : whole.segments) {
    const PeerCopies* mine = nullptr;
    for (const PeerCopies& peer : plan.peers) mine = peer.owner == s.owner ? &peer : mine;
    WANT(mine != nullptr);
    bool found = false;
    for (const EngineCopy& copy : mine->copies) {
      for (const RowRange& range : copy.ranges) {
        if (s.src_row < range.from || s.src_row + s.rows > range.from + range.rows) continue;
        WANT(!found && s.dst_row - range.to == s.src_row - range.from);
        found = true;
        for (int32_t i = 0; i < s.band_count; ++i) {
          WANT(std::count(copy.bands.begin(), copy.bands.end(), s.band_begin + i) == 1);
        }
      }
    }
    WANT(found);
    rows += s.rows;
  }
  WANT(rows == sent.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 200;
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const auto below = [&](int end) { return static_cast<int>(random() % end); };
  int64_t boxes = 0, copies_cut = 0;
  for (int call = 0; call < calls; ++call) {
    PlanParams params{
        1 + below(6), 0,           1 + below(8), 16, static_cast<Layout>(below(2)), 1 + below(3),
        below(4) - 1, 1 + below(9)};
    const int kind = below(4), even = 1 + below(80);
    std::vector<int32_t> counts(params.world * params.world * params.local_experts);
    for (int32_t& count : counts) {
      count = kind == 0 ? even : kind == 1 && below(3) != 0 ? 0 : below(100);
    }
    const int experts = params.world * params.local_experts;
    if (kind == 2) std::fill_n(counts.begin(), experts, 0);  // a rank without tokens
    const int most = 1 + below(4);
    const int64_t row_bytes = 16 * (1 + below(64)), least = 1 + below(1 << 17);
    for (params.rank = 0; params.rank < params.world; ++params.rank) {
      if (!check(params, counts, row_bytes, most, least, &boxes)) {
        std::fprintf(stderr, "call %d rank %d of %d\n", call, params.rank, params.world);
        return 1;
      }
      for (const auto& peer : plan_copies(params, counts.data(), row_bytes, most, least).peers) {
        copies_cut += peer.copies.size() > 1;
      }
    }
  }
  std::printf("%lld %lld\n", static_cast<long long>(boxes), static_cast<long long>(copies_cut));
  return 0;
}
