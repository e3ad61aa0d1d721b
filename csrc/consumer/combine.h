// C ABI of the operator: GEMM 2, the return of its rows and the weighted sum, in one call.
#pragma once

#include "../producer/producer.h"
#include "../scale/scale.h"

namespace tilemoe {

struct CopyEngine;  // copy/copy_engine.h

enum class Mover : int32_t {
  sm = 0,           // the consumer kernel beside the producer; the drain ships what is left
  none = 1,         // no consumer kernel: the drain ships everything
  sequential = 2,   // for measuring: producer without drain, and when it has ended the consumer
  copy_engine = 3,  // no SM: streams wait for bands and copy; the call's C has been fetched
};

// How rows reach their owners: plain stores to its mapped memory, or the transport's puts.
enum class Transport : int32_t { mapped = 0, put = 1 };

// The count exchange of the call is in `stream` already, and producer.ship and the counters
// (tilemoe_set_counters) are filled in; producer.drain is set here.
struct CombineParams {
  ProducerParams producer;
  ProducerKind kind;
  ScaleParams scale;
  Mover mover;
  int32_t num_consumer_ctas;     // 0 to sms - 1 (sequential: 1 to sms)
  int32_t sms;                   // of the device
  Transport transport;           // put: the consumer of csrc/transport ships; the drain does not
  int32_t device_split;          // 1: num_consumer_ctas is the most; State::consumer_ctas decides
  cudaStream_t consumer_stream;  // of higher priority than the call's stream
  cudaEvent_t begin;             // both made with cudaEventDisableTiming
  cudaEvent_t end;
  const int32_t* pes;       // device, [W]: the transport's number of each rank; read for put only
  CopyEngine* copy_engine;  // host; of this rank's heap; read by its mover only
};

}  // namespace tilemoe

extern "C" {

// Loads every kernel of the operator on the current device: once, at start-up.
cudaError_t tilemoe_load();

// Producer, consumer beside it on consumer_stream, scale behind the producer; what follows in
// `stream` is behind all three. Nothing waits on the host, but for the mover copy_engine: it waits
// for C first (tilemoe_copy_engine_fetch), cannot be captured, and launches scale behind its
// copies.
cudaError_t tilemoe_combine_launch(const tilemoe::CombineParams* params, cudaStream_t stream);
}
