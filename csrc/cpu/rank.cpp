#include "rank.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "../planner/planner.h"
#include "count_exchange.h"
#include "weighted_sum.h"

namespace tilemoe::cpu {

namespace {

std::vector<Block> blocks_of(const RankConfig& config) {
  const HeapOffsets offsets = heap_offsets(config.heap);
  std::vector<Block> blocks;
  for (int r = 0; r < config.heap.world; ++r) {
    blocks.emplace_back(config.region + r * offsets.block_bytes, config.heap, offsets);
  }
  return blocks;
}

}  // namespace

Rank::Rank(RankConfig config)
    : config_(std::move(config)),
      blocks_(blocks_of(config_)),
      watch_(blocks_, config_.rank, config_.pids, interrupted) {}

void Rank::poison() {
  std::memset(own().dispatch(), 0xff, config_.heap.dispatch_bytes);
  std::memset(own().recv(), 0xff, config_.heap.recv_bytes);
}

void Rank::begin(const Layer& layer, const std::int32_t* expert_ids, std::int64_t tokens,
                 const char* routing_error) {
  watch_.check();
  layer_ = layer;
  layer_.plan.rank = config_.rank;
  layer_.plan.world = config_.heap.world;
  tokens_ = tokens;
  const int world = config_.heap.world, local_experts = layer_.plan.local_experts;
  const std::int32_t experts = world * local_experts;
  if (experts > config_.heap.max_experts) {  // equal on all ranks, and nothing is sent yet
    throw Error(ErrorKind::capacity,
                std::string("layer ") + layer.name + " has " + std::to_string(experts) +
                    " experts, the heap was made for " + std::to_string(config_.heap.max_experts));
  }
  ++epoch_;
  stats_ = IterationStats{};
  stats_.epoch = static_cast<std::int64_t>(epoch_);
  std::string error = routing_error == nullptr ? "" : routing_error;
  // Of a rank with too many tokens nothing is read: all hear of it below.
  const bool readable = error.empty() && tokens <= config_.max_tokens;
  const std::string wrong = routes_.read(expert_ids, readable ? tokens : 0, layer.topk, experts);
  if (error.empty()) error = wrong;

  // Nobody counts into this epoch's half before it has the count row sent below.
  const auto half = epoch_ % kHalves;
  for (int s = 0; s < world; ++s) {
    reset(own().arrival(epoch_, s));
    for (int e = 0; e < local_experts; ++e) reset(own().run(epoch_, e, s));
  }
  reset(tile_claim_[half]), reset(chunk_claim_[half]), reset(shipped_);

  const CountNews news{epoch_, layer.name, layer.fingerprint, tokens, routes_.counts, error};
  const RandomDelay delay(random_delay_us, random_delay_seed + epoch_ * 31 + config_.rank);
  send_counts(blocks_, config_.rank, news, delay);
  counts_ =
      receive_counts(own(), world, news, config_.max_tokens, config_.group_timeout_ns, watch_);
  make_plan();
  check_capacity();
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
  demand("receive", plan_.recv_row[routes_.counts.size()] * layer_.out_row_bytes,
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
      const std::int64_t rows = routes_.counts[expert];
      if (rows == 0) continue;
      std::byte* to = blocks_[peer].dispatch() + plan_.dispatch_row[expert] * bytes;
      const std::int32_t* token = routes_.tokens.data() + plan_.recv_row[expert];
      for (std::int64_t i = 0; i < rows; ++i) {
        std::memcpy(to + i * bytes, x + token[i] * bytes, bytes);
      }
      delay();
      flag_add(blocks_[peer].run(epoch_, local, config_.rank), rows);
    }
  }
}

void Rank::wait_expert(std::int32_t local_expert) {
  const std::int64_t experts = static_cast<std::int64_t>(routes_.counts.size());
  const int global = config_.rank * layer_.plan.local_experts + local_expert;
  for (int s = 0; s < config_.heap.world; ++s) {
    const Word target = counts_[s * experts + global];
    Word& word = own().run(epoch_, local_expert, s);
    watch_.wait([&] { return flag_load(word) == target; },
                [&] {
                  return "in layer " + std::string(layer_.name) + " for rows of expert " +
                         std::to_string(global) + " from " + rank_name(s) + " (seen " +
                         std::to_string(flag_load(word)) + ", wanted " + std::to_string(target) +
                         ")";
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
      done.spins += watch_.wait(
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
    watch_.check();
  }
  stats_.last_put = all.last_put;
  stats_.idle_spins = all.spins;
}

template <class T>
void Rank::sum_rows(const float* weights, T* y) const {
  const std::int64_t n = layer_.out_row_bytes / static_cast<std::int64_t>(sizeof(T));
  const int first_local = config_.rank * layer_.plan.local_experts;
  const auto* recv = reinterpret_cast<const T*>(own().recv());
  const auto* out = reinterpret_cast<const T*>(out_);
  const auto row_of = [&](std::int64_t route) -> const T* {
    const int expert = routes_.expert[route];
    if (expert < 0) return nullptr;
    const int local = expert - first_local;
    if (local < 0 || local >= layer_.plan.local_experts) return recv + routes_.row[route] * n;
    // It never left this rank.
    const std::int64_t in_run = routes_.row[route] - plan_.recv_row[expert];
    return out + (plan_.run_row[local * config_.heap.world + config_.rank] + in_run) * n;
  };
  weighted_sum(tokens_, layer_.topk, n, weights, row_of, y);
}

void Rank::scale(const float* weights, std::byte* y, DType dtype) {
  for (int s = 0; s < config_.heap.world; ++s) {
    const Word target = plan_.arrival_target[s];
    Word& word = own().arrival(epoch_, s);
    watch_.wait([&] { return flag_load(word) == target; },
                [&] {
                  return "in layer " + std::string(layer_.name) + " for the rows that " +
                         rank_name(s) + " owes (seen " + std::to_string(flag_load(word)) +
                         ", wanted " + std::to_string(target) + ")";
                },
                config_.wait_timeout_ns, s, Role::caller);
  }
  stats_.last_arrival = now_ns() - start_ns_;
  // A rank whose own rows all came must not go on alone when its peers have given up.
  watch_.check();
  switch (dtype) {
    case DType::f32:
      return sum_rows(weights, reinterpret_cast<float*>(y));
    case DType::bf16:
      return sum_rows(weights, reinterpret_cast<BFloat16*>(y));
    case DType::f16:
      return sum_rows(weights, reinterpret_cast<Float16*>(y));
  }
}

}  // namespace tilemoe::cpu
