// Mover::copy_engine at its best, for the bench: C is known to the host in advance, so that all of
// a call is queued before its GEMM begins.
#pragma once

#include <chrono>
#include <string>

#include "operator_timing.cuh"

namespace harness {

class CopyAhead {
 public:
  // The group has engines. most, least_bytes: as in plan_copies.
  CopyAhead(Bench& bench, int most, int64_t least_bytes) : group_(bench.group()) {
    const Shape& shape = group_.shape();
    for (int r = 0; r < shape.world; ++r) {
      plans_.emplace_back();
      for (int fresh = 0; fresh < Bench::kFresh; ++fresh) {
        plans_[r].push_back(plan_copies(shape.plan(r), bench.counts(fresh).data(),
                                        shape.row_bytes(), most, least_bytes));
      }
      host_us_.emplace_back();
    }
  }

  // As tilemoe_combine_launch; the exchange of the call is in rank.main, and has zeroed the flags
  // where the streams begin.
  void launch(Rank& rank, CombineParams p, int fresh) {
    const auto start = std::chrono::steady_clock::now();
    p.producer.drain = 0;
    p.scale.uncounted = 1;
    set_engine_copies(*rank.engine, plans_[rank.rank][fresh], rank.epoch);
    CHECK_CUDA(cudaEventRecord(rank.begin, rank.main));
    CHECK_CUDA(tilemoe_producer_launch(&p.producer, p.kind, p.sms, rank.main));
    CHECK_CUDA(queue_engine_copies(*rank.engine, p.producer.ship, rank.begin));
    CHECK_CUDA(tilemoe_scale_launch(&p.scale, rank.main));
    CHECK_CUDA(join_engine_copies(*rank.engine, rank.main));
    host_us_[rank.rank].push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
            .count());
  }

  // Of rank 0 in routing 0.
  std::string words() const {
    size_t copies = 0, calls = 0, waits = 0, most_waits = 0;
    int64_t least = INT64_MAX, most = 0;
    for (const PeerCopies& peer : plans_[0][0].peers) {
      for (const EngineCopy& copy : peer.copies) {
        ++copies;
        calls += copy.is_box() ? 1 : copy.ranges.size();
        waits += copy.bands.size();
        most_waits = std::max(most_waits, copy.bands.size());
        least = std::min(least, copy.rows);
        most = std::max(most, copy.rows);
      }
    }
    const double mib = static_cast<double>(group_.shape().row_bytes()) / (1 << 20);
    char line[200];
    std::snprintf(line, sizeof(line),
                  "%zu copies of %.1f-%.1f MiB in %zu calls, %zu waits, at most %zu a copy", copies,
                  copies == 0 ? 0.0 : least * mib, most * mib, calls, waits, most_waits);
    return line;
  }
  // What queuing a call took the host, us, all ranks.
  std::vector<double> host_us() const {
    std::vector<double> all;
    for (const auto& of_rank : host_us_) all.insert(all.end(), of_rank.begin(), of_rank.end());
    return all;
  }

 private:
  Group& group_;
  std::vector<std::vector<CopyPlan>> plans_;  // [rank][routing]
  std::vector<std::vector<double>> host_us_;  // [rank]
};

}  // namespace harness
