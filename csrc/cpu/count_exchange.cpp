#include "count_exchange.h"

#include <cstring>

namespace tilemoe::cpu {

namespace {

void judge(const Block& own, int world, const CountNews& news, std::int64_t max_tokens) {
  const auto row_of = [&](int source) -> const CountRow& {
    return own.count_row(news.epoch, source);
  };
  for (int s = 0; s < world; ++s) {
    const CountRow& row = row_of(s);
    if (row.status == Status::failed) {
      throw Error(ErrorKind::rank_failure, rank_name(s) + " failed in its routing: " + row.message);
    }
  }
  const CountRow& first = row_of(0);
  for (int s = 1; s < world; ++s) {
    const CountRow& row = row_of(s);
    if (row.layer != first.layer) {
      throw Error(ErrorKind::rank_failure, "ranks run different layers in the same call: rank 0 " +
                                               std::string(first.message) + ", rank " +
                                               std::to_string(s) + " " + row.message +
                                               "; layers of a group must run in one order");
    }
  }
  for (int s = 0; s < world; ++s) {
    const std::int64_t tokens = row_of(s).tokens;
    if (tokens > max_tokens) {
      throw Error(ErrorKind::capacity,
                  rank_name(s) + " has too many tokens in layer " + news.layer + ": needed " +
                      std::to_string(tokens) + ", available " + std::to_string(max_tokens) +
                      "; set max_tokens_per_rank to the longest call and apply() again");
    }
  }
}

}  // namespace

void send_counts(const std::vector<Block>& blocks, int rank, const CountNews& news,
                 RandomDelay delay) {
  delay();
  for (const Block& peer : blocks) {
    CountRow& row = peer.count_row(news.epoch, rank);
    row.layer = news.fingerprint;
    row.tokens = news.tokens;
    row.status = news.error.empty() ? Status::ok : Status::failed;
    copy_message(news.error.empty() ? news.layer : news.error, row.message);
    std::memcpy(peer.counts(news.epoch, rank), news.counts.data(),
                news.counts.size() * sizeof(std::int32_t));
    flag_store(row.ready, news.epoch);
    delay();
  }
}

std::vector<std::int32_t> receive_counts(const Block& own, int world, const CountNews& news,
                                         std::int64_t max_tokens, std::int64_t timeout_ns,
                                         Watch& watch) {
  const std::size_t experts = news.counts.size();
  std::vector<std::int32_t> counts(world * experts);
  for (int s = 0; s < world; ++s) {
    const Word& ready = own.count_row(news.epoch, s).ready;
    watch.wait([&] { return flag_load(ready) == news.epoch; },
               [&] {
                 return "for " + rank_name(s) + " to enter layer " + news.layer + " (call " +
                        std::to_string(news.epoch) + ", seen " + std::to_string(flag_load(ready)) +
                        "); all ranks must run the same layers equally often and agree on grad "
                        "mode";
               },
               timeout_ns, s, Role::caller);
    std::memcpy(&counts[s * experts], own.counts(news.epoch, s), experts * sizeof(std::int32_t));
  }
  judge(own, world, news, max_tokens);
  return counts;
}

}  // namespace tilemoe::cpu
