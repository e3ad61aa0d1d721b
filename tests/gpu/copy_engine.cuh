// The return of rows by copy engines: a stream for each peer waits for bands in the GPU's front
// end, copies, and writes the peer's arrival word. An experiment, not part of the package: the host
// has to know C, and nothing on the device ends a wait of a stream, so the host must watch.
#pragma once

#include <cuda.h>

#include <chrono>
#include <string>

#include "copy_plan.h"
#include "operator_timing.cuh"

namespace harness {

using BatchMemOp = decltype(&cuStreamBatchMemOp);

// The driver's entry point through the runtime, so that nothing links against libcuda.
inline BatchMemOp batch_mem_op() {
  static const BatchMemOp found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &function, 12000,
                                                cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) {
      std::fprintf(stderr, "the driver has no cuStreamBatchMemOp\n");
      std::exit(2);
    }
    return reinterpret_cast<BatchMemOp>(function);
  }();
  return found;
}

// A stream and an event for each peer of each rank, shared by all ways to copy.
class PeerStreams {
 public:
  explicit PeerStreams(Group& group) : group_(group), of_rank_(group.shape().world) {
    for (Rank& rank : group_.ranks()) {
      rank.use();
      int low = 0, high = 0;
      CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&low, &high));
      for (int place = 1; place < group.shape().world; ++place) {
        OfPeer peer;
        CHECK_CUDA(cudaStreamCreateWithPriority(&peer.stream, cudaStreamNonBlocking, high));
        CHECK_CUDA(cudaEventCreateWithFlags(&peer.end, cudaEventDisableTiming));
        of_rank_[rank.rank].push_back(peer);
      }
    }
    // A stream's first work of a kind may wait for the whole GPU. Before any call: words are 0.
    for (Rank& rank : group_.ranks()) {
      rank.use();
      for (int place = 1; place < group.shape().world; ++place) {
        const OfPeer& peer = at(rank, place - 1);
        Rank& owner = group_[(rank.rank + place) % group.shape().world];
        await(peer.stream, {reinterpret_cast<uint32_t*>(rank.state)}, 0);
        CHECK_CUDA(
            cudaMemcpyPeerAsync(owner.y, owner.device, rank.y, rank.device, 16, peer.stream));
        write(peer.stream, arrivals(rank, owner, 0), 0);
        CHECK_CUDA(cudaEventRecord(peer.end, peer.stream));
        CHECK_CUDA(cudaStreamSynchronize(peer.stream));
      }
    }
  }
  ~PeerStreams() {
    for (Rank& rank : group_.ranks()) {
      rank.use();
      for (OfPeer& peer : of_rank_[rank.rank]) {
        cudaStreamDestroy(peer.stream);
        cudaEventDestroy(peer.end);
      }
    }
  }
  PeerStreams(const PeerStreams&) = delete;

  struct OfPeer {
    cudaStream_t stream;
    cudaEvent_t end;
  };
  const OfPeer& at(const Rank& rank, int number) const { return of_rank_[rank.rank][number]; }

  // Until each word is `value` or more. The front end reads device memory where the kernel's
  // additions are performed (L2), behind the bulk stores that its fence orders before them; PTX
  // says nothing of readers that are no threads, so this rests on what the check sees.
  static void await(cudaStream_t stream, const std::vector<const uint32_t*>& words,
                    uint32_t value) {
    constexpr size_t kMost = 128;  // the driver takes 256 at once
    for (size_t first = 0; first < words.size(); first += kMost) {
      std::vector<CUstreamBatchMemOpParams> waits(std::min(kMost, words.size() - first));
      for (size_t i = 0; i < waits.size(); ++i) {
        waits[i] = {};
        waits[i].operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        waits[i].waitValue.address = reinterpret_cast<CUdeviceptr>(words[first + i]);
        waits[i].waitValue.value = value;
        waits[i].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
      }
      check(batch_mem_op()(stream, static_cast<unsigned>(waits.size()), waits.data(), 0));
    }
  }
  // Behind all that is in the stream, copies too: the driver fences the system in front of it. The
  // word's upper half stays 0, as it is since the exchange.
  static void write(cudaStream_t stream, uint64_t* word, uint32_t value) {
    CUstreamBatchMemOpParams op{};
    op.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op.writeValue.address = reinterpret_cast<CUdeviceptr>(word);
    op.writeValue.value = value;
    op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    check(batch_mem_op()(stream, 1, &op, 0));
  }
  // As arrival_word of common/wait.cuh, for the host.
  static uint64_t* arrivals(const Rank& source, const Rank& owner, uint64_t epoch) {
    const RankView& view = source.view;
    const int64_t line = static_cast<int64_t>(epoch % 2) * view.world + source.rank;
    return reinterpret_cast<uint64_t*>(owner.block + view.offsets.arrivals + line * kLineBytes);
  }

 private:
  static void check(CUresult result) {
    if (result == CUDA_SUCCESS) return;
    std::fprintf(stderr, "cuStreamBatchMemOp: error %d\n", static_cast<int>(result));
    std::exit(2);
  }

  Group& group_;
  std::vector<std::vector<OfPeer>> of_rank_;
};

// One way to cut and copy.
class CopyEngine {
 public:
  // most, least_bytes: as in plan_copies. boxes: ranges of equal lengths and distances go in one
  // copy of two dimensions, else each is a copy of its own.
  CopyEngine(Bench& bench, PeerStreams& streams, int most, int64_t least_bytes, bool boxes)
      : group_(bench.group()), streams_(streams), boxes_(boxes) {
    const Shape& shape = group_.shape();
    for (int r = 0; r < shape.world; ++r) {
      plans_.emplace_back();
      for (int fresh = 0; fresh < Bench::kFresh; ++fresh) {
        plans_[r].push_back(
            plan_copies(shape.plan(r), bench.counts(fresh), shape.row_bytes(), most, least_bytes));
      }
      host_us_.emplace_back();
    }
  }

  // As tilemoe_combine_launch with a producer on all SMs and no consumer; the exchange of the call
  // is in rank.main. What follows there is behind the copies, so that the reuse rule holds.
  void launch(Rank& rank, CombineParams p, int fresh) {
    const auto start = std::chrono::steady_clock::now();
    const uint64_t epoch = rank.epoch;
    p.producer.drain = 0;
    p.scale.records = nullptr;  // it would wait for chunks that nobody ships
    CHECK_CUDA(cudaEventRecord(rank.begin, rank.main));
    CHECK_CUDA(tilemoe_producer_launch(&p.producer, p.kind, p.sms, rank.main));
    CHECK_CUDA(tilemoe_scale_launch(&p.scale, rank.main));
    const auto* const flags =
        reinterpret_cast<const uint32_t*>(half_of(rank.view, epoch) + sizeof(Half));
    const std::vector<PeerCopies>& peers = plans_[rank.rank][fresh];
    for (size_t i = 0; i < peers.size(); ++i) {
      const PeerStreams::OfPeer& peer = streams_.at(rank, static_cast<int>(i));
      const Rank& owner = group_[peers[i].owner];
      CHECK_CUDA(cudaStreamWaitEvent(peer.stream, rank.begin, 0));
      for (const EngineCopy& copy : peers[i].copies) {
        std::vector<const uint32_t*> words;
        for (int32_t band : copy.bands) words.push_back(flags + band);
        PeerStreams::await(peer.stream, words, group_.shape().n_tiles());
        move(rank, owner, copy, peer.stream);
      }
      PeerStreams::write(peer.stream, PeerStreams::arrivals(rank, owner, epoch),
                         static_cast<uint32_t>(peers[i].rows));
      CHECK_CUDA(cudaEventRecord(peer.end, peer.stream));
      CHECK_CUDA(cudaStreamWaitEvent(rank.main, peer.end, 0));
    }
    host_us_[rank.rank].push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
            .count());
  }

  // Of rank 0 in routing 0.
  std::string words() const {
    size_t copies = 0, calls = 0, waits = 0, most_waits = 0;
    int64_t least = INT64_MAX, most = 0;
    for (const PeerCopies& peer : plans_[0][0]) {
      for (const EngineCopy& copy : peer.copies) {
        ++copies;
        calls += in_box(copy) ? 1 : copy.ranges.size();
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
  bool in_box(const EngineCopy& copy) const { return boxes_ && copy.is_box(); }

  void move(const Rank& rank, const Rank& owner, const EngineCopy& copy, cudaStream_t stream) {
    const int64_t row_bytes = group_.shape().row_bytes();
    std::byte* const from = reinterpret_cast<std::byte*>(rank.d);
    std::byte* const to = owner.block + rank.view.offsets.recv;
    if (!in_box(copy)) {
      for (const RowRange& range : copy.ranges) {
        CHECK_CUDA(cudaMemcpyPeerAsync(to + range.to * row_bytes, owner.device,
                                       from + range.from * row_bytes, rank.device,
                                       range.rows * row_bytes, stream));
      }
      return;
    }
    const RowRange &first = copy.ranges[0], &second = copy.ranges[1];
    const size_t width = first.rows * row_bytes, height = copy.ranges.size();
    cudaMemcpy3DPeerParms box{};
    box.srcDevice = rank.device;
    box.srcPtr = make_cudaPitchedPtr(from + first.from * row_bytes,
                                     (second.from - first.from) * row_bytes, width, height);
    box.dstDevice = owner.device;
    box.dstPtr = make_cudaPitchedPtr(to + first.to * row_bytes, (second.to - first.to) * row_bytes,
                                     width, height);
    box.extent = make_cudaExtent(width, height, 1);
    CHECK_CUDA(cudaMemcpy3DPeerAsync(&box, stream));
  }

  Group& group_;
  PeerStreams& streams_;
  const bool boxes_;
  std::vector<std::vector<std::vector<PeerCopies>>> plans_;  // [rank][routing]
  std::vector<std::vector<double>> host_us_;                 // [rank]
};

}  // namespace harness
