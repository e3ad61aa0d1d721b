#include "watch.h"

namespace tilemoe::cpu {

std::string rank_name(int rank) { return "rank " + std::to_string(rank) + " of the group"; }

Watch::Watch(const std::vector<Block>& blocks, int rank, const std::vector<std::int64_t>& pids,
             const std::function<bool()>& interrupted)
    : blocks_(blocks), rank_(rank), pids_(pids), interrupted_(interrupted) {}

std::string Watch::failure() const {
  const Failure* first = nullptr;
  for (int source = 0; source < static_cast<int>(blocks_.size()); ++source) {
    const Failure& failure = blocks_[rank_].failure(source);
    if (flag_load(failure.time_ns) == 0) continue;
    if (first == nullptr || flag_load(failure.time_ns) < flag_load(first->time_ns)) {
      first = &failure;
    }
  }
  if (first != nullptr) return first->message;
  const std::lock_guard lock(mutex_);
  return text_;
}

void Watch::fail(const std::string& cause) {
  const std::lock_guard lock(mutex_);
  if (failed_here_) return;
  text_ = cause;
  const Word time_ns = static_cast<Word>(now_ns());
  for (const Block& block : blocks_) {
    Failure& failure = block.failure(rank_);
    copy_message(cause, failure.message);
    flag_store(failure.time_ns, time_ns);
    flag_store(block.failed(), 1);
  }
  failed_here_ = true;
}

void Watch::check() const {
  if (!failed_here_ && flag_load(blocks_[rank_].failed()) == 0) return;
  throw Error(ErrorKind::deadline, failure());
}

}  // namespace tilemoe::cpu
