#include "../copy/copy_engine.h"
#include "../planner/exchange.h"
#include "../transport/transport.h"
#include "combine.h"
#include "fail.h"

// The transport is linked on its own, as relocatable code against a library of its own. Weak: a
// program without it (tests/gpu) has no puts and needs nothing of it.
extern "C" {
__attribute__((weak)) cudaError_t tilemoe_put_consumer_load();
__attribute__((weak)) cudaError_t tilemoe_put_consumer_launch(const tilemoe::ShipParams* params,
                                                              const int32_t* pes, int32_t ctas,
                                                              int32_t last, cudaStream_t stream);
}

cudaError_t tilemoe_load() {
  for (const auto load : {tilemoe_exchange_load, tilemoe_producer_load, tilemoe_consumer_load,
                          tilemoe_put_consumer_load, tilemoe_scale_load, tilemoe_fail_load}) {
    const cudaError_t error = load == nullptr ? cudaSuccess : load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

namespace {

using tilemoe::ceil_div;
using tilemoe::CombineParams;
using tilemoe::Mover;
using tilemoe::Transport;

// Whether GEMM 2 raises each of its bands' flags to what the copies wait for.
bool can_copy(const CombineParams& p) {
  const int32_t n_tiles = ceil_div(p.producer.n, p.kind.tile_n);
  return p.copy_engine != nullptr && p.transport == Transport::mapped && p.kind.gated == 0 &&
         p.producer.band_flags != nullptr && p.producer.ship.n_tiles == n_tiles;
}

cudaError_t refuse(const CombineParams* params) {
  if (params == nullptr || params->num_consumer_ctas < 0 || params->sms < 1 ||
      (params->mover == Mover::sm && params->num_consumer_ctas >= params->sms) ||
      (params->mover == Mover::sequential && params->num_consumer_ctas < 1) ||
      (params->device_split != 0 && params->mover != Mover::sm) ||
      (params->mover == Mover::copy_engine && !can_copy(*params)) ||
      (params->transport == Transport::put && params->pes == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (params->transport == Transport::put && tilemoe_put_consumer_launch == nullptr) {
    return cudaErrorNotSupported;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t tilemoe_combine_launch(const CombineParams* params, cudaStream_t stream) {
  cudaError_t error = refuse(params);
  if (error != cudaSuccess) return error;
  // Keeps the first error.
  const auto good = [&error](cudaError_t result) {
    if (error == cudaSuccess) error = result;
    return error == cudaSuccess;
  };
  const bool put = params->transport == Transport::put;
  const bool sequential = params->mover == Mover::sequential;
  const int32_t ctas = params->num_consumer_ctas;
  tilemoe::CopyEngine* const engine =
      params->mover == Mover::copy_engine ? params->copy_engine : nullptr;
  const bool beside = params->mover == Mover::sm && ctas > 0;
  const cudaStream_t side = params->consumer_stream;
  tilemoe::ProducerParams producer = params->producer;
  // A GEMM kernel may not call the transport.
  producer.drain = sequential || put || engine != nullptr ? 0 : 1;
  producer.ship.device_split = beside ? params->device_split : 0;
  const auto ship = [&](int32_t grid, bool last, cudaStream_t where) {
    return put ? tilemoe_put_consumer_launch(&producer.ship, params->pes, grid, last, where)
               : tilemoe_consumer_launch(&producer.ship, grid, where);
  };

  tilemoe::ScaleParams scale = params->scale;
  scale.uncounted = engine != nullptr ? 1 : 0;

  if (engine != nullptr && !good(plan_engine_copies(*engine, producer.ship.row_bytes))) {
    return error;
  }
  if (beside && !(good(cudaEventRecord(params->begin, stream)) &&
                  good(cudaStreamWaitEvent(side, params->begin, 0)))) {
    return error;
  }
  // The producer first: it never waits for the consumer. Where kernels are serialised its drain
  // ships everything and the consumer finds nothing left.
  const bool fixed = beside && params->device_split == 0;
  if (!good(tilemoe_producer_launch(&producer, params->kind,
                                    fixed ? params->sms - ctas : params->sms, stream))) {
    return error;
  }
  // From here on the other streams are joined whatever comes: the next call writes where they read.
  if (beside) {
    good(ship(ctas, false, side));
    good(cudaEventRecord(params->end, side));
  }
  // The engine's copies are in front of scale, which a host that launches one kernel at a time
  // would wait for, and so for the peers' copies. Where rows are put, a second consumer takes the
  // drain's place: whatever the one beside the producer has not claimed. Scale needs this rank's
  // GEMM 2 and its peers' rows, not this rank's consumer.
  if (error == cudaSuccess &&
      (engine == nullptr || good(queue_engine_copies(*engine, producer.ship, nullptr))) &&
      (!sequential || good(ship(ctas, false, stream))) &&
      (!put || sequential || good(ship(params->sms, true, stream)))) {
    good(tilemoe_scale_launch(&scale, stream));
  }
  if (engine != nullptr) good(join_engine_copies(*engine, stream));
  if (beside) good(cudaStreamWaitEvent(stream, params->end, 0));
  return error;
}
