#include "rank.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "../planner/planner.h"

namespace tilemoe::cpu {

namespace {

// Copies a message into a fixed field, cut at a whole UTF-8 character.
template <std::size_t N>
void copy_message(const std::string& from, char (&to)[N]) {
  std::size_t n = std::min(from.size(), N - 1);
  if (n < from.size()) {
    while (n > 0 && (static_cast<unsigned char>(from[n]) & 0xc0u) == 0x80u) --n;
  }
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

std::string rank_name(int rank) { return "rank " + std::to_string(rank) + " of the group"; }

}  // namespace

Rank::Rank(RankConfig config) : config_(std::move(config)) {
  const HeapOffsets offsets = heap_offsets(config_.heap);
  for (int r = 0; r < config_.heap.world; ++r) {
    blocks_.emplace_back(config_.region + r * offsets.block_bytes, config_.heap, offsets);
  }
}

std::string Rank::failure() const {
  const Failure* first = nullptr;
  for (int r = 0; r < config_.heap.world; ++r) {
    const Failure& failure = own().failure(r);
    if (flag_load(failure.time_ns) == 0) continue;
    if (first == nullptr || flag_load(failure.time_ns) < flag_load(first->time_ns)) {
      first = &failure;
    }
  }
  if (first != nullptr) return first->message;
  const std::lock_guard lock(failed_mutex_);
  return failed_text_;
}

void Rank::fail(const std::string& cause) {
  const std::lock_guard lock(failed_mutex_);
  if (failed_here_) return;
  failed_text_ = cause;
  const Word time_ns = static_cast<Word>(now_ns());
  for (const Block& block : blocks_) {
    Failure& failure = block.failure(config_.rank);
    copy_message(cause, failure.message);
    flag_store(failure.time_ns, time_ns);
    flag_store(block.failed(), 1);
  }
  failed_here_ = true;
}

void Rank::poison() {
  std::memset(own().dispatch(), 0xff, config_.heap.dispatch_bytes);
  std::memset(own().recv(), 0xff, config_.heap.recv_bytes);
}

void Rank::check_failed() const {
  if (!failed_here_ && flag_load(own().failed()) == 0) return;
  throw Error(ErrorKind::deadline, failure());
}

template <class Ready, class Describe>
std::int64_t Rank::wait(Ready ready, Describe describe, std::int64_t timeout_ns, int peer,
                        Role role) {
  constexpr std::int64_t kCheckNs = 50'000'000;
  Backoff backoff;
  std::int64_t started = 0, checked = 0;
  while (!ready()) {
    backoff.pause();
    const std::int64_t now = now_ns();
    if (started == 0) started = checked = now;
    check_failed();
    const auto give_up = [&](const std::string& why) {
      fail(rank_name(config_.rank) + " waited " + describe() + ": " + why);
      check_failed();
    };
    if (now - started > timeout_ns) {
      give_up("deadline of " + std::to_string(timeout_ns / 1'000'000) + " ms passed");
    }
    if (now - checked > kCheckNs) {
      checked = now;
      const std::int64_t pid = config_.pids.empty() ? 0 : config_.pids[peer];
      if (!process_alive(pid)) {
        // It may have done its part and ended: what it wrote is still there.
        if (ready()) break;
        give_up(rank_name(peer) + " (process " + std::to_string(pid) + ") has ended");
      }
      if (role == Role::caller && interrupted()) {
        fail(rank_name(config_.rank) + " was interrupted while it waited " + describe());
        throw Error(ErrorKind::interrupted, "interrupted");
      }
    }
  }
  return backoff.polls();
}

void Rank::begin(const Layer& layer, const std::int32_t* expert_ids, std::int64_t tokens,
                 const char* routing_error) {
  check_failed();
  layer_ = layer;
  layer_.plan.rank = config_.rank;
  layer_.plan.world = config_.heap.world;
  tokens_ = tokens;
  const std::int32_t experts = config_.heap.world * layer_.plan.local_experts;
  if (experts > config_.heap.max_experts) {  // equal on all ranks, and nothing is sent yet
    throw Error(ErrorKind::capacity,
                std::string("layer ") + layer.name + " has " + std::to_string(experts) +
                    " experts, the heap was made for " + std::to_string(config_.heap.max_experts));
  }
  std::string error = routing_error == nullptr ? "" : routing_error;
  ++epoch_;
  stats_ = IterationStats{};
  stats_.epoch = static_cast<std::int64_t>(epoch_);
  if (tokens > config_.max_tokens) tokens = 0;  // told to all below; nothing of it is read
  count_routes(expert_ids, error.empty() ? tokens : 0, &error);
  publish_counts(error);
  await_counts();
  make_plan();
  check_capacity();
}

void Rank::count_routes(const std::int32_t* expert_ids, std::int64_t tokens, std::string* error) {
  const std::int32_t experts = config_.heap.world * layer_.plan.local_experts;
  const std::int64_t routes = tokens * layer_.topk;
  own_counts_.assign(experts, 0);
  route_expert_.assign(expert_ids, expert_ids + routes);
  for (std::int64_t i = 0; i < routes && error->empty(); ++i) {
    const std::int32_t expert = expert_ids[i];
    if (expert < -1 || expert >= experts) {
      *error = "expert id " + std::to_string(expert) + " of token " +
               std::to_string(i / layer_.topk) + " is outside [-1, " + std::to_string(experts) +
               "): -1 means dropped";
      break;
    }
    if (expert == -1) continue;
    for (std::int64_t j = i / layer_.topk * layer_.topk; j < i; ++j) {
      if (expert_ids[j] == expert) {  // would break the bound that buffers are made for
        *error = "token " + std::to_string(i / layer_.topk) + " goes twice to expert " +
                 std::to_string(expert) + ": the experts of a token must differ";
      }
    }
    ++own_counts_[expert];
  }
  if (!error->empty()) {
    std::fill(own_counts_.begin(), own_counts_.end(), 0);
    return;
  }
  // Receive rows are sorted by expert, inside an expert by (token, k).
  std::vector<std::int64_t> next(experts);
  std::int64_t row = 0;
  for (std::int32_t e = 0; e < experts; ++e) next[e] = row, row += own_counts_[e];
  sorted_tokens_.resize(row);
  route_row_.assign(routes, -1);
  for (std::int64_t i = 0; i < routes; ++i) {
    if (expert_ids[i] < 0) continue;
    route_row_[i] = next[expert_ids[i]]++;
    sorted_tokens_[route_row_[i]] = static_cast<std::int32_t>(i / layer_.topk);
  }
}

void Rank::publish_counts(const std::string& error) {
  const int rank = config_.rank;
  // Nobody counts into this epoch's half before it has the count row sent below.
  const auto half = epoch_ % kHalves;
  for (int s = 0; s < config_.heap.world; ++s) reset(own().arrival(epoch_, s));
  for (int e = 0; e < layer_.plan.local_experts; ++e) {
    for (int s = 0; s < config_.heap.world; ++s) reset(own().run(epoch_, e, s));
  }
  reset(tile_claim_[half]), reset(chunk_claim_[half]), reset(shipped_);

  RandomDelay delay(random_delay_us, random_delay_seed + epoch_ * 31 + rank);
  delay();
  for (const Block& peer : blocks_) {
    CountRow& row = peer.count_row(epoch_, rank);
    row.layer = layer_.fingerprint;
    row.tokens = tokens_;
    row.status = error.empty() ? Status::ok : Status::failed;
    copy_message(error.empty() ? std::string(layer_.name) : error, row.message);
    std::memcpy(peer.counts(epoch_, rank), own_counts_.data(),
                own_counts_.size() * sizeof(std::int32_t));
    flag_store(row.ready, epoch_);
    delay();
  }
}

void Rank::await_counts() {
  const int world = config_.heap.world;
  const std::size_t experts = own_counts_.size();
  counts_.resize(world * experts);
  for (int s = 0; s < world; ++s) {
    wait([&] { return flag_load(own().count_row(epoch_, s).ready) == epoch_; },
         [&] {
           return "for " + rank_name(s) + " to enter layer " + layer_.name + " (call " +
                  std::to_string(epoch_) + ", seen " +
                  std::to_string(flag_load(own().count_row(epoch_, s).ready)) +
                  "); all ranks must run the same layers equally often and agree on grad mode";
         },
         config_.group_timeout_ns, s, Role::caller);
    std::memcpy(&counts_[s * experts], own().counts(epoch_, s), experts * sizeof(std::int32_t));
  }
  // Every rank judges the same rows in the same order, so every rank throws the same.
  std::string failed;
  for (int s = 0; s < world; ++s) {
    const CountRow& row = own().count_row(epoch_, s);
    if (row.status == Status::failed) {
      throw Error(ErrorKind::rank_failure, rank_name(s) + " failed in its routing: " + row.message);
    }
  }
  const CountRow& first = own().count_row(epoch_, 0);
  for (int s = 1; s < world; ++s) {
    const CountRow& row = own().count_row(epoch_, s);
    if (row.layer != first.layer) {
      throw Error(ErrorKind::rank_failure, "ranks run different layers in the same call: rank 0 " +
                                               std::string(first.message) + ", rank " +
                                               std::to_string(s) + " " + row.message +
                                               "; layers of a group must run in one order");
    }
  }
  for (int s = 0; s < world; ++s) {
    const std::int64_t tokens = own().count_row(epoch_, s).tokens;
    if (tokens > config_.max_tokens) {
      throw Error(ErrorKind::capacity,
                  rank_name(s) + " has too many tokens in layer " + layer_.name + ": needed " +
                      std::to_string(tokens) + ", available " + std::to_string(config_.max_tokens) +
                      "; set max_tokens_per_rank to the longest call and apply() again");
    }
  }
}

void Rank::make_plan() {
  const PlanParams& params = layer_.plan;
  const std::int64_t experts = params.world * params.local_experts;
  plan_.sizes = plan_sizes(params, counts_.data());
  bands_.resize(plan_.sizes.bands);
  segments_.resize(plan_.sizes.segments);
  chunks_.resize(plan_.sizes.chunks);
  plan_words_.resize(params.local_experts + 1 + experts + params.world + experts + experts + 1);
  plan_.expert_row = plan_words_.data();
  plan_.run_row = plan_.expert_row + params.local_experts + 1;
  plan_.arrival_target = plan_.run_row + experts;
  plan_.dispatch_row = plan_.arrival_target + params.world;
  plan_.recv_row = plan_.dispatch_row + experts;
  plan_.bands = bands_.data();
  plan_.segments = segments_.data();
  plan_.chunks = chunks_.data();
  plan_fill(params, counts_.data(), &plan_);
  stats_.segments = plan_.sizes.segments;
  band_ready_[epoch_ % kHalves].assign(plan_.sizes.bands, 0);
}

// The heap is made for max_tokens, so this only fails for a caller that made it for another layer.
void Rank::check_capacity() {
  const auto demand = [&](const char* room, std::int64_t needed, std::int64_t available) {
    if (needed <= available) return;
    const std::string cause = std::string("layer ") + layer_.name + " does not fit the " + room +
                              " room of the heap: needed " + std::to_string(needed) +
                              " bytes, available " + std::to_string(available);
    fail(cause);  // other ranks may fit and would wait
    throw Error(ErrorKind::capacity, cause);
  };
  demand("dispatch", plan_.sizes.rows * layer_.in_row_bytes, config_.heap.dispatch_bytes);
  demand("receive", plan_.recv_row[own_counts_.size()] * layer_.out_row_bytes,
         config_.heap.recv_bytes);
}

void Rank::dispatch(const std::byte* x) {
  RandomDelay delay(random_delay_us, random_delay_seed + epoch_ * 37 + config_.rank);
  const int world = config_.heap.world, local_experts = layer_.plan.local_experts;
  const std::int64_t bytes = layer_.in_row_bytes;
  for (int step = 0; step < world; ++step) {  // own rows first: they need no peer
    const int peer = (config_.rank + step) % world;
    for (int local = 0; local < local_experts; ++local) {
      const int expert = peer * local_experts + local;
      const std::int64_t rows = own_counts_[expert];
      if (rows == 0) continue;
      std::byte* to = blocks_[peer].dispatch() + plan_.dispatch_row[expert] * bytes;
      const std::int32_t* token = sorted_tokens_.data() + plan_.recv_row[expert];
      for (std::int64_t i = 0; i < rows; ++i) {
        std::memcpy(to + i * bytes, x + token[i] * bytes, bytes);
      }
      delay();
      flag_add(blocks_[peer].run(epoch_, local, config_.rank), rows);
    }
  }
}

void Rank::wait_expert(std::int32_t local_expert) {
  const std::int64_t experts = static_cast<std::int64_t>(own_counts_.size());
  const int global = config_.rank * layer_.plan.local_experts + local_expert;
  for (int s = 0; s < config_.heap.world; ++s) {
    const Word target = counts_[s * experts + global];
    Word& word = own().run(epoch_, local_expert, s);
    wait([&] { return flag_load(word) == target; },
         [&] {
           return "in layer " + std::string(layer_.name) + " for rows of expert " +
                  std::to_string(global) + " from " + rank_name(s) + " (seen " +
                  std::to_string(flag_load(word)) + ", wanted " + std::to_string(target) + ")";
         },
         config_.wait_timeout_ns, s, Role::caller);
  }
}

void Rank::produce(const CombineArgs& args) {
  const auto half = epoch_ % kHalves;
  const std::int64_t bytes = element_bytes(args.dtype);
  const std::int32_t n_tiles = (args.n + args.tile_n - 1) / args.tile_n;
  const std::int64_t tiles = static_cast<std::int64_t>(plan_.sizes.bands) * n_tiles;
  RandomDelay delay(random_delay_us, random_delay_seed + epoch_ * 41 + config_.rank);
  for (;;) {
    const std::int64_t claim = static_cast<std::int64_t>(claim_next(tile_claim_[half]));
    if (claim >= tiles) break;
    const TileIndex tile = tile_of_claim(claim, plan_.sizes.bands, n_tiles, args.group_bands);
    const Band& band = plan_.bands[tile.band];
    const std::int32_t column = tile.n_tile * args.tile_n;
    const std::byte* bias = args.bias[band.expert];
    // Whole tiles, pad rows too: a row's result then never depends on how its band was filled.
    args.gemm({args.hidden + band.row * args.k * bytes,
               args.weight[band.expert] + static_cast<std::int64_t>(column) * args.k * bytes,
               bias == nullptr ? nullptr : bias + column * bytes,
               args.out + (band.row * args.n + column) * bytes, args.n, layer_.plan.tile_m,
               std::min(args.tile_n, args.n - column), args.k});
    delay();
    const Word before = flag_add(band_ready_[half][tile.band], 1);
    if (tile.band == 0 && before + 1 == static_cast<Word>(n_tiles) && plan_.sizes.segments > 0) {
      stats_.first_segment_ready = now_ns() - start_ns_;  // segment 0 is band 0
    }
  }
}

Rank::Consumed Rank::consume(const CombineArgs& args, Role role, std::uint64_t seed) {
  const auto half = epoch_ % kHalves;
  const std::int64_t bytes = layer_.out_row_bytes;
  const Word n_tiles = (args.n + args.tile_n - 1) / args.tile_n;
  RandomDelay delay(random_delay_us, seed);
  std::vector<std::int64_t> shipped(config_.heap.world, 0);
  const auto signal = [&] {
    for (int owner = 0; owner < config_.heap.world; ++owner) {
      if (shipped[owner] == 0) continue;
      flag_add(blocks_[owner].arrival(epoch_, config_.rank), shipped[owner]);
      shipped[owner] = 0;
    }
  };
  Consumed done;
  for (;;) {
    delay();
    const std::int64_t claim = static_cast<std::int64_t>(claim_next(chunk_claim_[half]));
    if (claim >= plan_.sizes.chunks) break;
    const Chunk& chunk = plan_.chunks[claim];
    const Segment& segment = plan_.segments[chunk.segment];
    for (int band = segment.band_begin; band < segment.band_begin + segment.band_count; ++band) {
      const Word& word = band_ready_[half][band];
      done.spins += wait(
          [&] { return flag_load(word) >= n_tiles; },
          [&] {
            return "in layer " + std::string(layer_.name) + " for band " + std::to_string(band) +
                   " of its own producer (seen " + std::to_string(flag_load(word)) + ", wanted " +
                   std::to_string(n_tiles) + ")";
          },
          // Its own GEMM may take as long as it takes; if it fails, the failure ends this wait.
          config_.group_timeout_ns, config_.rank, role);
    }
    shipped[segment.owner] += chunk.rows;
    if constexpr (kFault == Fault::arrival_before_copy) signal();
    std::memcpy(blocks_[segment.owner].recv() + (segment.dst_row + chunk.row) * bytes,
                args.out + (segment.src_row + chunk.row) * bytes, chunk.rows * bytes);
    claim_next(shipped_);
    ++done.chunks;
    done.last_put = now_ns() - start_ns_;
  }
  delay();
  signal();
  return done;
}

void Rank::combine(const CombineArgs& args) {
  out_ = args.out;
  start_ns_ = now_ns();
  std::mutex mutex;
  Consumed all;
  std::string worker_error;
  const std::uint64_t seed = random_delay_seed + epoch_ * 43 + config_.rank * 7;
  const auto start_consumers = [&] {
    workers_.start(args.num_consumers, [&, seed](int index) {
      Consumed mine;
      std::string error;
      try {
        mine = consume(args, Role::consumer, seed + 1 + index);
      } catch (const std::exception& e) {
        error = e.what();
      }
      std::lock_guard lock(mutex);
      all.last_put = std::max(all.last_put, mine.last_put);
      all.spins += mine.spins;
      if (worker_error.empty()) worker_error = error;
    });
  };
  try {
    if (args.mover == Mover::consumer) start_consumers();
    produce(args);
    stats_.producer_end = now_ns() - start_ns_;
    stats_.backlog_at_producer_end =
        plan_.sizes.chunks -
        static_cast<std::int64_t>(std::atomic_ref(shipped_).load(std::memory_order_relaxed));
    if (args.mover == Mover::sequential) {
      start_consumers();
    } else {
      const Consumed drained = consume(args, Role::caller, seed);
      stats_.chunks_drained = drained.chunks;
      std::lock_guard lock(mutex);
      all.last_put = std::max(all.last_put, drained.last_put);
      all.spins += drained.spins;
    }
  } catch (const std::exception& e) {
    // Consumers of this rank wait for bands that will not come: the failure word ends them.
    fail(rank_name(config_.rank) + " failed in layer " + layer_.name + ": " + e.what());
    workers_.join();
    throw;
  }
  workers_.join();
  if (!worker_error.empty()) {
    fail(rank_name(config_.rank) + " failed in layer " + layer_.name + ": " + worker_error);
    check_failed();
  }
  stats_.last_put = all.last_put;
  stats_.idle_spins = all.spins;
}

template <class T>
void Rank::scale_rows(const float* weights, T* y) const {
  const std::int64_t n = layer_.out_row_bytes / static_cast<std::int64_t>(sizeof(T));
  const int first_local = config_.rank * layer_.plan.local_experts;
  const auto* recv = reinterpret_cast<const T*>(own().recv());
  const auto* out = reinterpret_cast<const T*>(out_);
  std::vector<float> sum(n);
  for (std::int64_t token = 0; token < tokens_; ++token) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int k = 0; k < layer_.topk; ++k) {
      const std::int64_t route = token * layer_.topk + k;
      const int expert = route_expert_[route];
      if (expert < 0) continue;
      const int local = expert - first_local;
      const T* row = recv + route_row_[route] * n;
      if (local >= 0 && local < layer_.plan.local_experts) {  // never left this rank
        const std::int64_t in_run = route_row_[route] - plan_.recv_row[expert];
        row = out + (plan_.run_row[local * config_.heap.world + config_.rank] + in_run) * n;
      }
      const float weight = weights[route];
      for (std::int64_t i = 0; i < n; ++i) sum[i] += weight * to_float(row[i]);
    }
    for (std::int64_t i = 0; i < n; ++i) from_float(sum[i], &y[token * n + i]);
  }
}

void Rank::scale(const float* weights, std::byte* y, DType dtype) {
  for (int s = 0; s < config_.heap.world; ++s) {
    const Word target = plan_.arrival_target[s];
    Word& word = own().arrival(epoch_, s);
    wait([&] { return flag_load(word) == target; },
         [&] {
           return "in layer " + std::string(layer_.name) + " for the rows that " + rank_name(s) +
                  " owes (seen " + std::to_string(flag_load(word)) + ", wanted " +
                  std::to_string(target) + ")";
         },
         config_.wait_timeout_ns, s, Role::caller);
  }
  stats_.last_arrival = now_ns() - start_ns_;
  // A rank whose own rows all came must not go on alone when its peers have given up.
  check_failed();
  switch (dtype) {
    case DType::f32:
      return scale_rows(weights, reinterpret_cast<float*>(y));
    case DType::bf16:
      return scale_rows(weights, reinterpret_cast<BFloat16*>(y));
    case DType::f16:
      return scale_rows(weights, reinterpret_cast<Float16*>(y));
  }
}

}  // namespace tilemoe::cpu
