#include <exception>
#include <memory>

#include "../common/driver.h"
#include "copy_engine.h"

namespace tilemoe {

// The streams are its own and of no pool: nobody else's work is to stand behind a wait.
struct CopyEngine {
  struct Peer {
    cudaStream_t stream = nullptr;
    cudaEvent_t end = nullptr;
  };

  RankView view{};
  int32_t most = 1;
  int64_t least_bytes = 1;
  std::vector<std::byte*> blocks;  // as RankView::blocks, here
  std::vector<Peer> peers;         // [W - 1], the next rank first
  cudaStream_t fetcher = nullptr;
  cudaEvent_t exchanged = nullptr, fetched = nullptr;
  int32_t max_counts = 0;
  int32_t* counts =
      nullptr;  // page-locked, as is `state`: written by copies, read behind `fetched`
  State* state = nullptr;
  PlanParams params{};    // of the call fetched
  bool fetching = false;  // between fetch and plan
  CopyPlan plan;          // of the call planned, as is `epoch`
  uint64_t epoch = 0;

  ~CopyEngine() {
    for (Peer& peer : peers) {
      if (peer.stream != nullptr) cudaStreamDestroy(peer.stream);
      if (peer.end != nullptr) cudaEventDestroy(peer.end);
    }
    if (fetcher != nullptr) cudaStreamDestroy(fetcher);
    for (cudaEvent_t event : {exchanged, fetched}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    cudaFreeHost(counts);
    cudaFreeHost(state);
  }

  const Peer& peer_of(int32_t owner) const {
    return peers[(owner - view.rank - 1 + view.world) % view.world];
  }
  std::byte* arrivals(int32_t owner) const {
    return blocks[owner] + arrival_offset(view, epoch, view.rank);
  }
};

namespace {

auto batch_mem_op() {
  static const auto found = driver_function<decltype(&cuStreamBatchMemOp)>("cuStreamBatchMemOp");
  return found;
}

cudaError_t queue_ops(cudaStream_t stream, std::vector<CUstreamBatchMemOpParams>& ops) {
  constexpr size_t kMost = 128;  // the driver takes 256 at once
  for (size_t first = 0; first < ops.size(); first += kMost) {
    const auto count = static_cast<unsigned>(std::min(kMost, ops.size() - first));
    const CUresult result = batch_mem_op()(stream, count, &ops[first], 0);
    if (result != CUDA_SUCCESS) return static_cast<cudaError_t>(result);  // of equal numbers
  }
  return cudaSuccess;
}

// ---- Band counter, read by a stream: flags.cuh has its writer.
// Reader: the front end of the peer's stream, which polls it in device memory (L2), where the
//         kernel's additions are performed, and then lets the copies of the stream begin.
// Order:  bulk stores -> wait_bulk_stores -> fence.acq_rel.gpu -> red.relaxed.gpu, as for the
//         consumer, and the copy engine reads L2. PTX says nothing of readers that are no threads:
//         that a copy behind the wait reads those rows rests on the driver's word that a stream's
//         work is behind its waits, and on the checks (tests/gpu, exact payload).
// GEQ: it stands at its target until the exchange of the epoch after next zeroes it, which is
// behind this call's copies. A word of the call before the last cannot be seen: the host has waited
// for the exchange that zeroed it (or the bench's streams have).
cudaError_t await_bands(cudaStream_t stream, const std::byte* flags,
                        const std::vector<int32_t>& bands, int32_t n_tiles) {
  std::vector<CUstreamBatchMemOpParams> waits(bands.size());
  for (size_t i = 0; i < bands.size(); ++i) {
    waits[i] = {};
    waits[i].operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    waits[i].waitValue.address =
        reinterpret_cast<CUdeviceptr>(flags + bands[i] * int64_t{sizeof(uint32_t)});
    waits[i].waitValue.value = static_cast<cuuint32_t>(n_tiles);
    waits[i].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  }
  return queue_ops(stream, waits);
}

// ---- Arrival word, written by a stream: flags.cuh has its reader, scale at the owner.
// Writer: the source rank's stream to that owner, once a call, behind all its copies. It is the
//         only writer of the word in a call by this mover, so it writes where CTAs add; 32 bits, as
//         the upper half is 0 since the owner's exchange and rows are fewer than 2^31.
// Scope:  sys. Order: copies -> the end of them, for which the stream waits -> the driver's fence
//         of the system in front of the write (CU_STREAM_WRITE_VALUE_DEFAULT) -> the write.
cudaError_t write_arrivals(cudaStream_t stream, std::byte* word, int64_t rows) {
  std::vector<CUstreamBatchMemOpParams> writes(1);
  writes[0] = {};
  writes[0].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  writes[0].writeValue.address = reinterpret_cast<CUdeviceptr>(word);
  writes[0].writeValue.value = static_cast<cuuint32_t>(rows);
  writes[0].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return queue_ops(stream, writes);
}

// By mapped addresses, so that a peer may be another process.
cudaError_t move_rows(const EngineCopy& copy, const std::byte* from, std::byte* to,
                      int64_t row_bytes, cudaStream_t stream) {
  if (copy.is_box()) {
    const RowRange &first = copy.ranges[0], &second = copy.ranges[1];
    const int64_t from_pitch = (second.from - first.from) * row_bytes;
    const int64_t to_pitch = (second.to - first.to) * row_bytes;
    if (from_pitch <= INT32_MAX && to_pitch <= INT32_MAX) {  // the device's longest pitch
      return cudaMemcpy2DAsync(to + first.to * row_bytes, to_pitch, from + first.from * row_bytes,
                               from_pitch, first.rows * row_bytes, copy.ranges.size(),
                               cudaMemcpyDefault, stream);
    }
  }
  for (const RowRange& range : copy.ranges) {
    const cudaError_t error =
        cudaMemcpyAsync(to + range.to * row_bytes, from + range.from * row_bytes,
                        range.rows * row_bytes, cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t make(CopyEngine& engine) {
  cudaError_t error = cudaSuccess;
  const auto good = [&error](cudaError_t result) { return (error = result) == cudaSuccess; };
  const auto event = [&](cudaEvent_t* made) {
    return good(cudaEventCreateWithFlags(made, cudaEventDisableTiming));
  };
  const RankView& view = engine.view;
  engine.blocks.resize(view.world);
  engine.peers.resize(view.world - 1);
  int low = 0, high = 0;
  if (!good(cudaMemcpy(engine.blocks.data(), view.blocks, view.world * sizeof(std::byte*),
                       cudaMemcpyDeviceToHost)) ||
      !good(cudaDeviceGetStreamPriorityRange(&low, &high)) ||
      !good(cudaStreamCreateWithPriority(&engine.fetcher, cudaStreamNonBlocking, high)) ||
      !event(&engine.exchanged) || !event(&engine.fetched) ||
      !good(cudaMallocHost(&engine.counts, engine.max_counts * sizeof(int32_t))) ||
      !good(cudaMallocHost(&engine.state, sizeof(State)))) {
    return error;
  }
  for (CopyEngine::Peer& peer : engine.peers) {
    if (!good(cudaStreamCreateWithPriority(&peer.stream, cudaStreamNonBlocking, high)) ||
        !event(&peer.end)) {
      return error;
    }
  }
  return error;
}

// A stream's first work of a kind may wait for the whole GPU, where kernels may be waiting for
// peers: so it is done once before any call. Reads of a peer, and writes nothing of anybody's.
cudaError_t warm_up(CopyEngine& engine) {
  cudaError_t error = cudaSuccess;
  const auto good = [&error](cudaError_t result) { return (error = result) == cudaSuccess; };
  void* memory = nullptr;
  if (!good(cudaMalloc(&memory, kLineBytes))) return error;
  auto* const word = static_cast<std::byte*>(memory);
  for (int32_t i = 1; i < engine.view.world && error == cudaSuccess; ++i) {
    const int32_t owner = (engine.view.rank + i) % engine.view.world;
    const auto& [stream, end] = engine.peer_of(owner);
    good(cudaMemsetAsync(word, 0, kLineBytes, stream)) && good(await_bands(stream, word, {0}, 0)) &&
        good(cudaMemcpyAsync(word, engine.blocks[owner], 16, cudaMemcpyDefault, stream)) &&
        good(write_arrivals(stream, word, 0)) && good(cudaEventRecord(end, stream)) &&
        good(cudaStreamSynchronize(stream));
  }
  if (error == cudaSuccess) {
    good(cudaMemcpyAsync(engine.state, engine.view.state, sizeof(State), cudaMemcpyDeviceToHost,
                         engine.fetcher)) &&
        good(cudaStreamSynchronize(engine.fetcher));
  }
  cudaFree(memory);
  return error;
}

}  // namespace

cudaError_t plan_engine_copies(CopyEngine& engine, int64_t row_bytes) {
  engine.plan = {};
  if (!engine.fetching) return cudaErrorInvalidValue;
  engine.fetching = false;
  const cudaError_t error = cudaEventSynchronize(engine.fetched);
  if (error != cudaSuccess) return error;
  const State& state = *engine.state;
  engine.epoch = state.epoch;
  if (state.outcome != Outcome::ok) return cudaSuccess;
  try {
    CopyPlan plan =
        plan_copies(engine.params, engine.counts, row_bytes, engine.most, engine.least_bytes);
    // A wait for a band that GEMM 2 does not make would never end.
    if (plan.bands != state.bands || plan.segments != state.segments) return cudaErrorInvalidValue;
    engine.plan = std::move(plan);
  } catch (const std::exception&) {  // C that no plan can be made of, or no memory
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t queue_engine_copies(CopyEngine& engine, const ShipParams& ship, cudaEvent_t behind) {
  cudaError_t error = cudaSuccess;
  // Keeps the first error.
  const auto good = [&error](cudaError_t result) {
    if (error == cudaSuccess) error = result;
    return error == cudaSuccess;
  };
  const std::byte* const flags = half_of(engine.view, engine.epoch) + sizeof(Half);
  const auto* const from = static_cast<const std::byte*>(ship.rows);
  for (const PeerCopies& peer : engine.plan.peers) {
    const auto& [stream, end] = engine.peer_of(peer.owner);
    std::byte* const to = engine.blocks[peer.owner] + engine.view.offsets.recv;
    if (behind != nullptr) good(cudaStreamWaitEvent(stream, behind, 0));
    for (const EngineCopy& copy : peer.copies) {
      if (error != cudaSuccess) break;
      good(await_bands(stream, flags, copy.bands, ship.n_tiles)) &&
          good(move_rows(copy, from, to, ship.row_bytes, stream));
    }
    if (error == cudaSuccess) {
      good(write_arrivals(stream, engine.arrivals(peer.owner), peer.rows));
    }
    // Behind an error too: to join is to wait for what was queued.
    if (!good(cudaEventRecord(end, stream))) return error;
  }
  return error;
}

cudaError_t join_engine_copies(CopyEngine& engine, cudaStream_t stream) {
  for (const PeerCopies& peer : engine.plan.peers) {
    const cudaError_t error = cudaStreamWaitEvent(stream, engine.peer_of(peer.owner).end, 0);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

void set_engine_copies(CopyEngine& engine, CopyPlan plan, uint64_t epoch) {
  engine.plan = std::move(plan);
  engine.epoch = epoch;
}

}  // namespace tilemoe

cudaError_t tilemoe_copy_engine_make(const tilemoe::RankView* view, int32_t max_counts,
                                     int32_t most, int64_t least_bytes,
                                     tilemoe::CopyEngine** engine) {
  using namespace tilemoe;
  if (view == nullptr || engine == nullptr || view->world < 1 || view->world > kMaxWorld ||
      max_counts < 1 || most < 1 || least_bytes < 1) {
    return cudaErrorInvalidValue;
  }
  if (batch_mem_op() == nullptr) return cudaErrorNotSupported;
  try {
    auto made = std::make_unique<CopyEngine>();
    made->view = *view;
    made->max_counts = max_counts;
    made->most = most;
    made->least_bytes = least_bytes;
    cudaError_t error = make(*made);
    if (error == cudaSuccess) error = warm_up(*made);
    if (error == cudaSuccess) *engine = made.release();
    return error;
  } catch (const std::exception&) {
    return cudaErrorMemoryAllocation;
  }
}

void tilemoe_copy_engine_free(tilemoe::CopyEngine* engine) { delete engine; }

cudaError_t tilemoe_copy_engine_fetch(tilemoe::CopyEngine* engine,
                                      const tilemoe::PlanKernelParams* plan, cudaStream_t stream) {
  using namespace tilemoe;
  if (engine == nullptr || plan == nullptr || plan->params.world != engine->view.world ||
      plan->params.rank != engine->view.rank) {
    return cudaErrorInvalidValue;
  }
  const int64_t world = plan->params.world;
  const int64_t counts = world * world * plan->params.local_experts;
  if (counts > engine->max_counts) return cudaErrorInvalidValue;
  engine->params = plan->params;
  cudaError_t error = cudaSuccess;
  const auto good = [&error](cudaError_t result) { return (error = result) == cudaSuccess; };
  engine->fetching = good(cudaEventRecord(engine->exchanged, stream)) &&
                     good(cudaStreamWaitEvent(engine->fetcher, engine->exchanged, 0)) &&
                     good(cudaMemcpyAsync(engine->counts, plan->counts, counts * sizeof(int32_t),
                                          cudaMemcpyDeviceToHost, engine->fetcher)) &&
                     good(cudaMemcpyAsync(engine->state, engine->view.state, sizeof(State),
                                          cudaMemcpyDeviceToHost, engine->fetcher)) &&
                     good(cudaEventRecord(engine->fetched, engine->fetcher));
  return error;
}
