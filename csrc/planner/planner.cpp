#include "planner.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/integers.h"

namespace tilemoe {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

[[noreturn]] void refuse(const std::string& name, int64_t got, const std::string& wanted) {
  throw std::invalid_argument(name + ": got " + std::to_string(got) + ", wanted " + wanted);
}

void need_at_least(const char* field, int64_t got, int64_t lowest) {
  if (got < lowest) {
    refuse(std::string("PlanParams.") + field, got, std::to_string(lowest) + " or more");
  }
}

void need_32_bits(const char* what, int64_t got, const char* fix) {
  if (got > kInt32Max) {
    refuse(what, got, "at most " + std::to_string(kInt32Max) + "; use a larger " + fix);
  }
}

void check_params(const PlanParams& params) {
  need_at_least("world", params.world, 1);
  need_at_least("rank", params.rank, 0);
  need_at_least("local_experts", params.local_experts, 1);
  need_at_least("tile_m", params.tile_m, 1);
  need_at_least("bands_per_segment", params.bands_per_segment, 1);
  need_at_least("local_tail_bands", params.local_tail_bands, -1);
  need_at_least("chunk_rows", params.chunk_rows, 1);
  if (params.rank >= params.world) {
    refuse("PlanParams.rank", params.rank, "less than world, " + std::to_string(params.world));
  }
  if (params.layout != Layout::compact && params.layout != Layout::aligned) {
    refuse("PlanParams.layout", static_cast<int64_t>(params.layout), "0 (compact) or 1 (aligned)");
  }
  const int64_t experts = static_cast<int64_t>(params.world) * params.local_experts;
  need_32_bits("world * local_experts", experts, "group of fewer experts");
}

void check_counts(const PlanParams& params, const int32_t* counts) {
  const int64_t experts = static_cast<int64_t>(params.world) * params.local_experts;
  const int64_t cells = params.world * experts;
  int32_t signs = 0;
  for (int64_t i = 0; i < cells; ++i) signs |= counts[i];
  if (signs >= 0) return;
  const int64_t at = std::find_if(counts, counts + cells, [](int32_t c) { return c < 0; }) - counts;
  const std::string where = std::to_string(at / experts) + ", " + std::to_string(at % experts);
  refuse("counts[" + where + "]", counts[at], "0 or more");
}

// One of this rank's experts in schedule order; rows and bands count from the expert's first row.
struct ExpertPlan {
  int32_t expert;
  int64_t row;         // first layout row
  int64_t valid_rows;  // over all owners
  int64_t bands;
  int64_t remote_bands;
  int64_t first_band;  // number of its first remote band; the others follow without a gap
  int64_t kept_local;  // local bands that follow its remote bands at once
};

// Kept between calls, so that a plan allocates nothing once it has seen its largest group.
struct Scratch {
  std::vector<ExpertPlan> experts;  // [E_local] in schedule order
  std::vector<int64_t> recv_row;    // [W, E_local] first row of this rank's experts at each owner
};

Scratch& scratch() {
  thread_local Scratch kept;
  return kept;
}

// Rows [from_row, to_row) of an expert and the bands [from_band, to_band) that hold them.
struct Cut {
  int64_t from_band;
  int64_t to_band;
  int64_t from_row;
  int64_t to_row;
};

class Planner {
 public:
  Planner(const PlanParams& params, const int32_t* counts, Scratch& scratch)
      : params_(params),
        counts_(counts),
        world_(params.world),
        local_experts_(params.local_experts),
        experts_total_(world_ * local_experts_),
        tile_m_(params.tile_m),
        experts_(scratch.experts),
        recv_row_(scratch.recv_row) {
    lay_out_own();
    order_bands();
  }

  PlanSizes sizes() const {
    PlanSizes sizes{};
    sizes.rows = rows_;
    int64_t remote_bands = 0;
    for (const ExpertPlan& plan : experts_) {
      sizes.valid_rows += plan.valid_rows;
      remote_bands += plan.remote_bands;
    }
    const int64_t bands = rows_ / tile_m_;
    need_32_bits("bands", bands, "tile_m");
    int64_t segments = 0;
    int64_t chunks = 0;
    for_each_run([&](const ExpertPlan& plan, int32_t, int64_t begin, int64_t rows) {
      for_each_cut(plan, begin, rows, [&](const Cut& cut) {
        ++segments;
        chunks += ceil_div(cut.to_row - cut.from_row, params_.chunk_rows);
      });
    });
    need_32_bits("segments", segments, "tile_m or bands_per_segment");
    need_32_bits("chunks", chunks, "chunk_rows");
    sizes.bands = static_cast<int32_t>(bands);
    sizes.remote_bands = static_cast<int32_t>(remote_bands);
    sizes.segments = static_cast<int32_t>(segments);
    sizes.chunks = static_cast<int32_t>(chunks);
    return sizes;
  }

  void fill(PlanView* plan) const {
    fill_rows(plan);
    fill_bands(plan);
    fill_segments(plan);
  }

 private:
  int64_t count(int64_t source, int64_t rank, int64_t local) const {
    return counts_[source * experts_total_ + rank * local_experts_ + local];
  }

  // Rows that a run takes in the layout.
  int64_t room(int64_t rows) const {
    return params_.layout == Layout::aligned ? ceil_div(rows, tile_m_) * tile_m_ : rows;
  }

  // Owner at place p of rank's layout; the rank itself is at the last place.
  int64_t owner_at(int64_t rank, int64_t place) const {
    const int64_t owner = rank + 1 + place;
    return owner < world_ ? owner : owner - world_;
  }

  void lay_out_own() {
    experts_.clear();
    rows_ = 0;
    for (int64_t local = 0; local < local_experts_; ++local) {
      ExpertPlan plan{};
      plan.expert = static_cast<int32_t>(local);
      plan.row = rows_;
      int64_t end = 0;
      for (int64_t place = 0; place < world_; ++place) {
        const int64_t rows = count(owner_at(params_.rank, place), params_.rank, local);
        if (place == world_ - 1) plan.remote_bands = ceil_div(end, tile_m_);
        plan.valid_rows += rows;
        end += room(rows);
      }
      plan.bands = ceil_div(end, tile_m_);
      rows_ += plan.bands * tile_m_;
      experts_.push_back(plan);
    }
  }

  void order_bands() {
    std::sort(experts_.begin(), experts_.end(), [](const ExpertPlan& a, const ExpertPlan& b) {
      return a.remote_bands != b.remote_bands ? a.remote_bands > b.remote_bands
                                              : a.expert < b.expert;
    });
    int64_t local_bands = 0;
    for (const ExpertPlan& plan : experts_) local_bands += plan.bands - plan.remote_bands;
    const int64_t tail = params_.local_tail_bands < 0 ? local_bands : params_.local_tail_bands;
    int64_t kept = std::max<int64_t>(local_bands - tail, 0);
    int64_t number = 0;
    last_remote_band_ = -1;
    for (ExpertPlan& plan : experts_) {
      plan.first_band = number;
      if (plan.remote_bands > 0) last_remote_band_ = number + plan.remote_bands - 1;
      plan.kept_local = std::min(kept, plan.bands - plan.remote_bands);
      kept -= plan.kept_local;
      number += plan.remote_bands + plan.kept_local;
    }
  }

  // visit(expert plan, owner, first row, rows) for the nonempty remote runs in schedule order.
  template <class Visit>
  void for_each_run(Visit&& visit) const {
    for (const ExpertPlan& plan : experts_) {
      int64_t begin = 0;
      for (int64_t place = 0; place < world_ - 1; ++place) {
        const int64_t owner = owner_at(params_.rank, place);
        const int64_t rows = count(owner, params_.rank, plan.expert);
        if (rows > 0) visit(plan, static_cast<int32_t>(owner), begin, rows);
        begin += room(rows);
      }
    }
  }

  // Cuts a remote run at band edges: the rank's first and last remote band alone, between them up
  // to bands_per_segment bands. The cuts of all runs together come out in (last band, src_row)
  // order, since runs follow each other in the layout as they do in the schedule.
  template <class Visit>
  void for_each_cut(const ExpertPlan& plan, int64_t begin, int64_t rows, Visit&& visit) const {
    const int64_t end = begin + rows;
    const int64_t end_band = ceil_div(end, tile_m_);
    const bool has_last = plan.first_band + end_band - 1 == last_remote_band_;
    for (int64_t band = begin / tile_m_; band < end_band;) {
      int64_t to_band = band + 1;
      if (plan.first_band + band > 0) {
        to_band = std::min(band + params_.bands_per_segment, end_band - (has_last ? 1 : 0));
        to_band = std::max(to_band, band + 1);  // the last remote band itself
      }
      visit(Cut{band, to_band, std::max(begin, band * tile_m_), std::min(end, to_band * tile_m_)});
      band = to_band;
    }
  }

  void fill_rows(PlanView* plan) const {
    for (int64_t i = 0; i < world_; ++i) plan->arrival_target[i] = 0;
    int64_t recv_row = 0;
    for (int64_t rank = 0; rank < world_; ++rank) {
      int64_t row = 0;
      for (int64_t local = 0; local < local_experts_; ++local) {
        const int64_t expert = rank * local_experts_ + local;
        plan->recv_row[expert] = recv_row;
        recv_row += count(params_.rank, rank, local);
        if (rank == params_.rank) plan->expert_row[local] = row;
        for (int64_t place = 0; place < world_; ++place) {
          const int64_t owner = owner_at(rank, place);
          if (owner == params_.rank) plan->dispatch_row[expert] = row;
          if (rank == params_.rank) plan->run_row[local * world_ + owner] = row;
          row += room(count(owner, rank, local));
        }
        row = ceil_div(row, tile_m_) * tile_m_;
        if (rank != params_.rank) plan->arrival_target[rank] += count(params_.rank, rank, local);
      }
    }
    plan->recv_row[experts_total_] = recv_row;
    plan->expert_row[local_experts_] = rows_;
  }

  void fill_bands(PlanView* plan) const {
    Band* out = plan->bands;
    for (const ExpertPlan& expert : experts_) {
      out = put_bands(expert, 0, expert.remote_bands + expert.kept_local, out);
    }
    for (const ExpertPlan& expert : experts_) {
      out = put_bands(expert, expert.remote_bands + expert.kept_local, expert.bands, out);
    }
  }

  Band* put_bands(const ExpertPlan& plan, int64_t from, int64_t to, Band* out) const {
    Band* const first = out;
    for (int64_t band = from; band < to; ++band) {
      *out++ = {plan.row + band * tile_m_, plan.expert, params_.tile_m};
    }
    if (params_.layout == Layout::compact) {
      if (to == plan.bands && to > from) {
        out[-1].rows -= static_cast<int32_t>(plan.bands * tile_m_ - plan.valid_rows);
      }
      return out;
    }
    int64_t end = 0;
    for (int64_t place = 0; place < world_; ++place) {
      const int64_t rows = count(owner_at(params_.rank, place), params_.rank, plan.expert);
      if (rows == 0) continue;
      end += ceil_div(rows, tile_m_);
      if (end <= from || end > to) continue;
      first[end - 1 - from].rows -= static_cast<int32_t>(room(rows) - rows);
    }
    return out;
  }

  void find_recv_rows() const {
    recv_row_.resize(world_ * local_experts_);
    const int64_t first = params_.rank * local_experts_;
    for (int64_t owner = 0; owner < world_; ++owner) {
      const int32_t* row = counts_ + owner * experts_total_;
      int64_t sum = 0;
      for (int64_t expert = 0; expert < first; ++expert) sum += row[expert];
      for (int64_t local = 0; local < local_experts_; ++local) {
        recv_row_[owner * local_experts_ + local] = sum;
        sum += row[first + local];
      }
    }
  }

  void fill_segments(PlanView* plan) const {
    find_recv_rows();
    Segment* segment = plan->segments;
    Chunk* chunk = plan->chunks;
    for_each_run([&](const ExpertPlan& expert, int32_t owner, int64_t begin, int64_t rows) {
      const int64_t dst_row = recv_row_[owner * local_experts_ + expert.expert] - begin;
      for_each_cut(expert, begin, rows, [&](const Cut& cut) {
        *segment = {expert.row + cut.from_row,
                    dst_row + cut.from_row,
                    static_cast<int32_t>(cut.to_row - cut.from_row),
                    owner,
                    static_cast<int32_t>(expert.first_band + cut.from_band),
                    static_cast<int32_t>(cut.to_band - cut.from_band)};
        chunk = put_chunks(static_cast<int32_t>(segment - plan->segments), segment->rows, chunk);
        ++segment;
      });
    });
  }

  // Cuts a segment as evenly as it goes, longer chunks first.
  Chunk* put_chunks(int32_t segment, int32_t rows, Chunk* out) const {
    const int32_t chunks = ceil_div(rows, params_.chunk_rows);
    const int32_t size = rows / chunks;
    const int32_t longer = rows % chunks;
    int32_t row = 0;
    for (int32_t i = 0; i < chunks; ++i) {
      const int32_t chunk_rows = size + (i < longer ? 1 : 0);
      *out++ = {segment, row, chunk_rows};
      row += chunk_rows;
    }
    return out;
  }

  const PlanParams& params_;
  const int32_t* const counts_;
  const int64_t world_;
  const int64_t local_experts_;
  const int64_t experts_total_;
  const int64_t tile_m_;
  std::vector<ExpertPlan>& experts_;
  std::vector<int64_t>& recv_row_;
  int64_t rows_ = 0;
  int64_t last_remote_band_ = -1;
};

bool same(const PlanSizes& a, const PlanSizes& b) {
  return a.rows == b.rows && a.valid_rows == b.valid_rows && a.bands == b.bands &&
         a.remote_bands == b.remote_bands && a.segments == b.segments && a.chunks == b.chunks;
}

}  // namespace

PlanSizes plan_sizes(const PlanParams& params, const int32_t* counts) {
  check_params(params);
  check_counts(params, counts);
  return Planner(params, counts, scratch()).sizes();
}

void plan_fill(const PlanParams& params, const int32_t* counts, PlanView* plan) {
  check_params(params);
  check_counts(params, counts);
  const Planner planner(params, counts, scratch());
  if (!same(planner.sizes(), plan->sizes)) {
    throw std::invalid_argument(
        "plan->sizes: differs from plan_sizes of these counts; wanted the same params and counts "
        "in both calls");
  }
  planner.fill(plan);
}

// With M rows in, n rows in an expert or run take ceil(n / t) = 1 + floor((n - 1) / t) bands, so
// with A of them nonempty all take at most A + floor((M - A) / t), which never falls as A rises
// (the floor drops by at most 1). A is at most M and at most the number there is:
//   bands:         A = experts (compact) or runs (aligned).
//   remote bands:  A = experts with remote rows, or remote runs; none if W is 1.
//   segments:      one per (remote band, owner) at most, whatever is joined.
//     aligned: a band has one owner, so as many as remote bands.
//     compact: one per nonempty remote run, and one more where a band edge lies inside a run. The
//       remote rows of expert e, n_e of them from an edge on, hold floor((n_e - 1) / t) edges, in
//       all at most floor((M - X) / t) for X experts with remote rows. A runs lie in at least
//       X = ceil(A / (W - 1)) experts; again the sum never falls as A rises. Every segment has
//       a row, so M is a bound too.
//   chunks:        S segments, r_s rows each: sum of 1 + floor((r_s - 1) / c) is at most
//       S + floor((M - S) / c), which never falls as S rises.
PlanSizes plan_bounds(const PlanParams& params, int64_t max_rows_in) {
  check_params(params);
  if (max_rows_in < 0) refuse("max_rows_in", max_rows_in, "0 or more");
  const int64_t tile_m = params.tile_m;
  const int64_t peers = params.world - 1;
  const auto at_most = [&](int64_t places) { return std::min(places, max_rows_in); };
  const auto bands_of = [&](int64_t nonempty) {
    return nonempty + (max_rows_in - nonempty) / tile_m;
  };
  const int64_t experts = at_most(params.local_experts);
  const int64_t runs = at_most(static_cast<int64_t>(params.local_experts) * params.world);
  const int64_t remote_runs = at_most(params.local_experts * peers);
  const bool aligned = params.layout == Layout::aligned;
  const int64_t bands = bands_of(aligned ? runs : experts);
  int64_t remote_bands = 0;
  int64_t segments = 0;
  int64_t chunks = 0;
  if (peers > 0) {
    remote_bands = bands_of(aligned ? remote_runs : experts);
    const int64_t edges = (max_rows_in - ceil_div(remote_runs, peers)) / tile_m;
    segments = aligned ? remote_bands : at_most(remote_runs + edges);
    chunks = segments + (max_rows_in - segments) / params.chunk_rows;
  }
  need_32_bits("bands", bands, "tile_m");
  need_32_bits("segments", segments, "tile_m");
  need_32_bits("chunks", chunks, "chunk_rows");
  return {bands * tile_m,
          max_rows_in,
          static_cast<int32_t>(bands),
          static_cast<int32_t>(remote_bands),
          static_cast<int32_t>(segments),
          static_cast<int32_t>(chunks)};
}

}  // namespace tilemoe
