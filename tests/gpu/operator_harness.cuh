// Shared by the operator's check and its bench: a group of ranks, W ranks over the GPUs there are
// (peer access instead of a symmetric heap): all in one process with one host thread each, or each
// in a process of its own (operator_process.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "consumer/combine.h"
#include "consumer/fail.h"
#include "copy/copy_engine.h"
#include "host.cuh"
#include "planner/exchange.h"
#include "planner/planner.h"

namespace harness {

using namespace tilemoe;

struct Shape {
  int world, local_experts, topk, n, k;
  int max_tokens;
  ProducerKind kind{Dtype::bfloat16, 256, 0};
  Layout layout = Layout::compact;
  int bands_per_segment = 1;
  int local_tail_bands = -1;
  int chunk_bytes = 64 << 10;
  int max_scale_ctas = 0;
  int64_t max_rows = 0;  // that a rank may get; 0 = what max_tokens allows

  int experts() const { return world * local_experts; }
  int n_tiles() const { return (n + kind.tile_n - 1) / kind.tile_n; }
  int64_t row_bytes() const { return int64_t{n} * 2; }
  PlanParams plan(int rank) const {
    const int rows = std::max<int64_t>(1, chunk_bytes / row_bytes());
    return {world, rank, local_experts, kProducerTileM, layout, bands_per_segment, local_tail_bands,
            rows};
  }
};

// How likely each expert is, so that the hottest rank gets `hot` times the mean rows. The experts
// of a token differ, which takes from the hot ones: found by halving on the expected rows.
inline std::vector<double> skew(const Shape& shape, int hot_rank, double hot) {
  const double here = shape.local_experts, there = shape.experts() - here;
  const auto rows = [&](double share) {  // of topk, on the hot rank
    double taken = 0.0;
    for (int k = 0; k < shape.topk; ++k) {
      const double mine = share * std::max(0.0, 1.0 - taken / here);
      const double others =
          (1.0 - share) * (there > 0.0 ? std::max(0.0, 1.0 - (k - taken) / there) : 0.0);
      taken += mine + others > 0.0 ? mine / (mine + others) : 0.0;
    }
    return taken;
  };
  double low = 0.0, high = 1.0;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (rows(middle) < hot / shape.world * shape.topk ? low : high) = middle;
  }
  const double share = shape.world == 1 ? 1.0 : std::min(low, 0.9999);  // others are drawn, too
  std::vector<double> shares(shape.experts());
  for (int e = 0; e < shape.experts(); ++e) {
    shares[e] =
        e / shape.local_experts == hot_rank ? share / here : (1.0 - share) / std::max(there, 1.0);
  }
  return shares;
}

// Expert ids of one rank's tokens, on its device, with what a router would have made of them.
struct Routing {
  int tokens = 0;
  std::vector<int32_t> ids, positions, counts;
  std::vector<float> weights;
  int32_t *ids_d = nullptr, *positions_d = nullptr, *counts_d = nullptr;
  float* weights_d = nullptr;
};

template <class T>
T* upload(const std::vector<T>& values) {
  T* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, (values.size() + 1) * sizeof(T)));
  CHECK_CUDA(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

// `shares`: how likely each expert is; empty = every expert as often as the others (to within one
// when tokens * topk allows). `dropped`: share of routes that are -1.
inline Routing make_routing(const Shape& shape, int tokens, const std::vector<double>& shares,
                            double dropped, std::mt19937_64& random) {
  Routing r;
  r.tokens = tokens;
  const int experts = shape.experts(), topk = shape.topk;
  r.ids.assign(size_t(tokens) * topk, -1);
  r.positions.assign(r.ids.size(), 0);
  r.weights.resize(r.ids.size());
  r.counts.assign(experts, 0);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  std::vector<int> order(tokens);
  for (int t = 0; t < tokens; ++t) order[t] = t;
  std::shuffle(order.begin(), order.end(), random);
  std::discrete_distribution<int> draw(shares.begin(), shares.end());
  for (int i = 0; i < tokens; ++i) {
    int32_t* const ids = &r.ids[size_t(order[i]) * topk];
    const int stride = std::max(1, experts / topk);  // experts of a token differ
    for (int k = 0; k < topk; ++k) {
      int expert = -1;
      while (expert < 0) {
        expert = shares.empty() ? (i + k * stride) % experts : draw(random);
        for (int j = 0; j < k; ++j) {
          if (ids[j] == expert) expert = shares.empty() ? (expert + 1) % experts : -1;
        }
      }
      ids[k] = expert;
    }
  }
  for (size_t i = 0; i < r.ids.size(); ++i) {
    r.weights[i] = static_cast<float>(uniform(random));
    if (uniform(random) < dropped) r.ids[i] = -1;
    if (r.ids[i] >= 0) r.positions[i] = r.counts[r.ids[i]]++;
  }
  r.ids_d = upload(r.ids);
  r.positions_d = upload(r.positions);
  r.counts_d = upload(r.counts);
  r.weights_d = upload(r.weights);
  return r;
}

inline void free_routing(Routing& r) {
  for (void* p : {static_cast<void*>(r.ids_d), static_cast<void*>(r.positions_d),
                  static_cast<void*>(r.counts_d), static_cast<void*>(r.weights_d)}) {
    cudaFree(p);
  }
}

inline std::string text(const ErrorRecord& e) {
  char line[200];
  std::snprintf(line, sizeof(line),
                "outcome %d wait %d of rank %d for %d band %lld seen %llu wanted %llu call %llu",
                int(e.outcome), int(e.wait), e.rank, e.peer, static_cast<long long>(e.band),
                static_cast<unsigned long long>(e.seen), static_cast<unsigned long long>(e.wanted),
                static_cast<unsigned long long>(e.epoch));
  return line;
}

// What the check's kernels find wrong with y.
struct Verdict {
  unsigned long long wrong;  // elements
  unsigned long long first_epoch;
  int first_token, first_column;
};

// How far a call has come on the GPU: an event behind each.
enum Stage { kPoisoned, kExchanged, kFilled, kCombined, kChecked, kStages };

// One rank: its device, memory, streams and the params of its kernels.
struct Rank {
  int rank = 0, device = 0, sms = 0;
  cudaStream_t main = nullptr, side = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  std::byte *block = nullptr, *state = nullptr;
  ErrorRecord* error = nullptr;    // page-locked
  CallRecord* records = nullptr;   // page-locked, [kCallRecords]
  int32_t* wanted_ctas = nullptr;  // page-locked
  RankView view{};
  PlanSizes bounds{};
  ExchangeParams exchange{};
  CombineParams combine{};
  uint16_t *a = nullptr, *d = nullptr, *y = nullptr;
  std::vector<const void*> b;
  Verdict* verdict = nullptr;    // device
  CopyEngine* engine = nullptr;  // of Group::make_engines
  cudaStream_t probe = nullptr;
  cudaEvent_t stage[kStages] = {};
  uint64_t epoch = 0;  // exchanges queued since reset(); wrong behind a captured graph
  // What the host thread of the rank is at, for whoever watches.
  std::shared_ptr<std::atomic<const char*>> at =
      std::make_shared<std::atomic<const char*>>("start");
  std::shared_ptr<std::atomic<long long>> calls = std::make_shared<std::atomic<long long>>(0);

  void use() const { CHECK_CUDA(cudaSetDevice(device)); }
  void reach(Stage stage_) { CHECK_CUDA(cudaEventRecord(stage[stage_], main)); }
  // The record of a call, if it is there and whole. The stream is idle.
  bool record(uint64_t wanted, CallRecord* copy) const {
    const volatile CallRecord& slot = records[wanted % kCallRecords];
    if (slot.epoch != wanted) {  // the last call's
      use();
      CHECK_CUDA(tilemoe_record_launch(&view, records, main));
      CHECK_CUDA(cudaStreamSynchronize(main));
    }
    if (slot.epoch != wanted) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    std::memcpy(copy, &records[wanted % kCallRecords], sizeof(*copy));
    std::atomic_thread_fence(std::memory_order_acquire);
    return slot.epoch == wanted;
  }
};

// A rank in a process of its own: how it meets the others and learns where their blocks are mapped.
struct Link {
  int rank;
  int devices;  // the first of this host's, shared by all ranks
  std::function<void()> meet;
  std::function<std::vector<std::byte*>(std::byte* mine)> exchange;
  std::function<void()> leave;  // nobody is at anybody's block any more
};

class Group {
 public:
  // link: this process has one rank of the group; else it has all of them.
  explicit Group(const Shape& shape, const Link* link = nullptr) : shape_(shape), link_(link) {
    int devices = 0;
    CHECK_CUDA(cudaGetDeviceCount(&devices));
    if (link != nullptr) devices = std::min(devices, link->devices);
    ranks_.resize(link != nullptr ? 1 : shape.world);
    const int64_t rows_in = shape.max_rows > 0 ? shape.max_rows
                                               : int64_t{shape.world} * shape.max_tokens *
                                                     std::min(shape.topk, shape.local_experts);
    offsets_ = block_offsets({shape.world, shape.experts(), 0,
                              int64_t{shape.max_tokens} * shape.topk * shape.row_bytes(), 0});
    std::vector<std::byte*> blocks;
    for (Rank& rank : ranks_) {
      rank.rank = link != nullptr ? link->rank : static_cast<int>(&rank - ranks_.data());
      rank.device = rank.rank % devices;
      rank.use();
      for (int peer = 0; link == nullptr && peer < devices; ++peer) {  // cudaIpc does it itself
        static bool enabled[64][64] = {};
        if (peer == rank.device || enabled[rank.device][peer]) continue;
        enabled[rank.device][peer] = true;
        CHECK_CUDA(cudaDeviceEnablePeerAccess(peer, 0));
      }
      CHECK_CUDA(tilemoe_load());
      CHECK_CUDA(cudaDeviceGetAttribute(&rank.sms, cudaDevAttrMultiProcessorCount, rank.device));
      // Not less than the driver hands out at once: another process maps the whole piece.
      rank.block = alloc<std::byte>(std::max<int64_t>(offsets_.block_bytes, 2 << 20));
      blocks.push_back(rank.block);
    }
    if (link != nullptr) blocks = link->exchange(ranks_[0].block);
    for (Rank& rank : ranks_) set_up(rank, rows_in, blocks);
    // A stream's first work may wait for the whole GPU, where a rank may be waiting for this one.
    for (Rank& rank : ranks_) {
      rank.use();
      for (cudaStream_t stream : {rank.main, rank.side, rank.probe}) {
        CHECK_CUDA(cudaMemsetAsync(rank.state, 0, state_bytes(rank.bounds.bands), stream));
        CHECK_CUDA(tilemoe_consumer_launch(&rank.combine.producer.ship, 1, stream));
        CHECK_CUDA(cudaEventRecord(rank.begin, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
      }
    }
    reset();
    if (link != nullptr) link->meet();
  }
  ~Group() {
    if (link_ != nullptr) link_->leave();
    for (const auto& [device, pointer] : memory_) {
      cudaSetDevice(device);
      cudaFree(pointer);
    }
    for (Rank& rank : ranks_) {
      rank.use();
      cudaStreamDestroy(rank.main);
      cudaStreamDestroy(rank.side);
      cudaStreamDestroy(rank.probe);
      cudaEventDestroy(rank.begin);
      cudaEventDestroy(rank.end);
      for (cudaEvent_t event : rank.stage) cudaEventDestroy(event);
      cudaFreeHost(rank.error);
      cudaFreeHost(rank.records);
      cudaFreeHost(rank.wanted_ctas);
      tilemoe_copy_engine_free(rank.engine);
    }
  }
  Group(const Group&) = delete;

  // The ranks of this process; with all of them here the index is the rank's number.
  std::vector<Rank>& ranks() { return ranks_; }
  Rank& operator[](int rank) { return ranks_[rank]; }
  const Shape& shape() const { return shape_; }

  // As a new heap: control words zero on all ranks, before any call.
  void reset() {
    for (Rank& rank : ranks_) {
      rank.use();
      CHECK_CUDA(cudaDeviceSynchronize());
      CHECK_CUDA(cudaMemset(rank.block, 0, offsets_.recv));
      CHECK_CUDA(cudaMemset(rank.state, 0, state_bytes(rank.bounds.bands)));
      CHECK_CUDA(cudaDeviceSynchronize());
      *rank.error = {};
      std::fill_n(rank.records, kCallRecords, CallRecord{});
      rank.epoch = 0;
    }
  }

  // For Mover::copy_engine, before any call. most, least_bytes: as in plan_copies.
  void make_engines(int most, int64_t least_bytes) {
    for (Rank& rank : ranks_) {
      rank.use();
      CHECK_CUDA(tilemoe_copy_engine_make(&rank.view, shape_.world * shape_.experts(), most,
                                          least_bytes, &rank.engine));
    }
  }

  // One host thread a rank.
  void each(const std::function<void(Rank&)>& work) {
    std::vector<std::thread> threads;
    for (Rank& rank : ranks_) {
      threads.emplace_back([&work, &rank] {
        rank.use();
        work(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Changes the view that every kernel of a rank gets.
  static void change_view(Rank& rank, const std::function<void(RankView&)>& change) {
    for (RankView* view : {&rank.view, &rank.exchange.view, &rank.combine.producer.ship.view,
                           &rank.combine.scale.view}) {
      change(*view);
    }
  }
  void launch_exchange(Rank& rank, const Routing& routing, int ctas) {
    ExchangeParams p = rank.exchange;
    p.own_counts = routing.counts_d;
    p.tokens = routing.tokens;
    p.consumer_ctas = ctas;
    CHECK_CUDA(tilemoe_exchange_launch(&p, rank.main));
    ++rank.epoch;
  }
  CombineParams combine_params(Rank& rank, const Routing& routing, Mover mover, int ctas) {
    CombineParams p = rank.combine;
    p.mover = mover;
    p.num_consumer_ctas = ctas;
    p.producer.group_bands = tilemoe_producer_group_bands(
        p.kind, shape_.n, mover == Mover::sm ? rank.sms - ctas : rank.sms);
    p.scale.expert_ids = routing.ids_d;
    p.scale.positions = routing.positions_d;
    p.scale.weights = routing.weights_d;
    p.scale.tokens = routing.tokens;
    return p;
  }
  void launch_combine(Rank& rank, const Routing& routing, Mover mover, int ctas) {
    CombineParams p = combine_params(rank, routing, mover, ctas);
    if (mover == Mover::copy_engine) {
      p.copy_engine = rank.engine;
      CHECK_CUDA(tilemoe_copy_engine_fetch(rank.engine, &rank.exchange.plan, rank.main));
    }
    CHECK_CUDA(tilemoe_combine_launch(&p, rank.main));
  }
  // Every row of A, D, the receive room and y becomes NaN. Before the exchange, by the reuse rule.
  void poison(Rank& rank) {
    CHECK_CUDA(cudaMemsetAsync(rank.a, 0xff, rank.bounds.rows * shape_.k * 2, rank.main));
    poison_results(rank);
  }
  void poison_results(Rank& rank) {
    CHECK_CUDA(cudaMemsetAsync(rank.d, 0xff, rank.bounds.rows * shape_.row_bytes(), rank.main));
    CHECK_CUDA(cudaMemsetAsync(rank.block + offsets_.recv, 0xff,
                               int64_t{shape_.max_tokens} * shape_.topk * shape_.row_bytes(),
                               rank.main));
    CHECK_CUDA(
        cudaMemsetAsync(rank.y, 0xff, int64_t{shape_.max_tokens} * shape_.row_bytes(), rank.main));
  }

 private:
  template <class T>
  T* alloc(int64_t count) {
    T* pointer = nullptr;
    int device = 0;
    CHECK_CUDA(cudaGetDevice(&device));
    CHECK_CUDA(cudaMalloc(&pointer, std::max<int64_t>(count, 1) * sizeof(T)));
    memory_.push_back({device, pointer});
    return pointer;
  }
  template <class T>
  T* put(const std::vector<T>& values) {
    T* const device = alloc<T>(values.size());
    CHECK_CUDA(
        cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
  }

  void set_up(Rank& rank, int64_t rows_in, const std::vector<std::byte*>& blocks) {
    rank.use();
    int low = 0, high = 0;
    CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&low, &high));
    CHECK_CUDA(cudaStreamCreateWithPriority(&rank.main, cudaStreamNonBlocking, low));
    CHECK_CUDA(cudaStreamCreateWithPriority(&rank.side, cudaStreamNonBlocking, high));
    CHECK_CUDA(cudaStreamCreateWithPriority(&rank.probe, cudaStreamNonBlocking, low));
    for (cudaEvent_t& event : rank.stage) {
      CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
    rank.verdict = alloc<Verdict>(1);
    CHECK_CUDA(cudaMemset(rank.verdict, 0, sizeof(Verdict)));
    CHECK_CUDA(cudaEventCreateWithFlags(&rank.begin, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventCreateWithFlags(&rank.end, cudaEventDisableTiming));
    CHECK_CUDA(cudaHostAlloc(&rank.error, sizeof(ErrorRecord), cudaHostAllocPortable));
    CHECK_CUDA(
        cudaHostAlloc(&rank.records, kCallRecords * sizeof(CallRecord), cudaHostAllocPortable));
    CHECK_CUDA(cudaHostAlloc(&rank.wanted_ctas, sizeof(int32_t), cudaHostAllocPortable));

    const PlanParams plan = shape_.plan(rank.rank);
    rank.bounds = plan_bounds(plan, rows_in);
    const PlanSizes& bounds = rank.bounds;
    rank.state = alloc<std::byte>(state_bytes(bounds.bands));
    rank.view = {shape_.world,
                 rank.rank,
                 offsets_,
                 put(blocks),
                 rank.state,
                 half_bytes(bounds.bands),
                 int64_t{20} * 1000 * 1000 * 1000,
                 rank.error,
                 0};
    const int64_t experts = shape_.experts();
    PlanKernelParams& p = rank.exchange.plan;
    p.params = plan;
    p.capacity = {bounds.rows, bounds.bands, bounds.segments, bounds.chunks};
    p.view.expert_row = alloc<int64_t>(shape_.local_experts + 1);
    p.view.run_row = alloc<int64_t>(experts);
    p.view.bands = alloc<Band>(bounds.bands);
    p.view.segments = alloc<Segment>(bounds.segments);
    p.view.chunks = alloc<Chunk>(bounds.chunks);
    p.view.arrival_target = alloc<int64_t>(shape_.world);
    p.view.dispatch_row = alloc<int64_t>(experts);
    p.view.recv_row = alloc<int64_t>(experts + 1);
    p.counts = alloc<int32_t>(shape_.world * experts);
    rank.exchange.view = rank.view;
    rank.exchange.layer = 7;
    rank.exchange.max_tokens = shape_.max_tokens;
    rank.exchange.records = rank.records;
    rank.exchange.group_timeout_ns = rank.view.wait_timeout_ns;

    const int64_t row_count = std::max<int64_t>(bounds.rows, kProducerTileM);
    rank.a = alloc<uint16_t>(row_count * shape_.k);
    rank.d = alloc<uint16_t>(row_count * shape_.n);
    rank.y = alloc<uint16_t>(int64_t{shape_.max_tokens} * shape_.n);
    std::vector<TensorMap> maps(shape_.local_experts);
    for (TensorMap& map : maps) {
      rank.b.push_back(alloc<uint16_t>(int64_t{shape_.n} * shape_.k));
      CHECK_CUDA(tilemoe_make_tensor_map(&map, rank.b.back(), shape_.kind.dtype, shape_.n, shape_.k,
                                         tilemoe_producer_b_box_rows(shape_.kind)));
    }
    CombineParams& c = rank.combine;
    c.kind = shape_.kind;
    CHECK_CUDA(tilemoe_make_tensor_map(&c.producer.a, rank.a, shape_.kind.dtype, row_count,
                                       shape_.k, kProducerTileM));
    CHECK_CUDA(tilemoe_make_tensor_map(&c.producer.a_few, rank.a, shape_.kind.dtype, row_count,
                                       shape_.k, kProducerFewRows));
    CHECK_CUDA(tilemoe_make_tensor_map(&c.producer.d, rank.d, shape_.kind.dtype, row_count,
                                       shape_.n, kProducerStoreRows));
    CHECK_CUDA(tilemoe_make_tensor_map(&c.producer.d_few, rank.d, shape_.kind.dtype, row_count,
                                       shape_.n, kProducerFewRows));
    c.producer.b = put(maps);
    c.producer.bands = p.view.bands;
    c.producer.ship = {
        rank.view, p.view.segments, p.view.chunks, rank.d, shape_.row_bytes(), shape_.n_tiles(), 0};
    c.producer.experts = shape_.local_experts;
    c.producer.n = shape_.n;
    c.producer.k = shape_.k;
    tilemoe_set_counters(&c.producer, 0);
    c.scale.view = rank.view;
    c.scale.run_row = p.view.run_row;
    c.scale.arrival_target = p.view.arrival_target;
    c.scale.recv_row = p.view.recv_row;
    c.scale.rows = rank.d;
    c.scale.y = rank.y;
    c.scale.topk = shape_.topk;
    c.scale.n = shape_.n;
    c.scale.local_experts = shape_.local_experts;
    c.scale.dtype = shape_.kind.dtype;
    c.scale.max_ctas = shape_.max_scale_ctas;
    c.sms = rank.sms;
    c.consumer_stream = rank.side;
    c.begin = rank.begin;
    c.end = rank.end;
  }

  Shape shape_;
  const Link* link_;
  BlockOffsets offsets_{};
  std::vector<Rank> ranks_;
  std::vector<std::pair<int, void*>> memory_;
};

}  // namespace harness
