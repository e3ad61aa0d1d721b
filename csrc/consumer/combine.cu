#include "../planner/exchange.h"
#include "combine.h"

cudaError_t tilemoe_load() {
  for (const auto load : {tilemoe_exchange_load, tilemoe_plan_load, tilemoe_producer_load,
                          tilemoe_consumer_load, tilemoe_scale_load}) {
    const cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t tilemoe_combine_launch(const tilemoe::CombineParams* params, cudaStream_t stream) {
  using tilemoe::Mover;
  if (params == nullptr || params->num_consumer_ctas < 0 || params->sms < 1 ||
      (params->mover == Mover::sm && params->num_consumer_ctas >= params->sms) ||
      (params->mover == Mover::sequential && params->num_consumer_ctas < 1)) {
    return cudaErrorInvalidValue;
  }
  tilemoe::ProducerParams producer = params->producer;
  producer.drain = params->mover == Mover::sequential ? 0 : 1;
  const int32_t ctas = params->num_consumer_ctas;
  const bool beside = params->mover == Mover::sm && ctas > 0;
  const cudaStream_t side = params->consumer_stream;
  cudaError_t error = cudaSuccess;
  const auto good = [&error](cudaError_t result) { return (error = result) == cudaSuccess; };
  if (beside && !(good(cudaEventRecord(params->begin, stream)) &&
                  good(cudaStreamWaitEvent(side, params->begin, 0)))) {
    return error;
  }
  // The producer first: it never waits for the consumer. Where kernels are serialised its drain
  // ships everything and the consumer finds nothing left.
  if (!good(tilemoe_producer_launch(&producer, params->kind,
                                    beside ? params->sms - ctas : params->sms, stream))) {
    return error;
  }
  if (beside && !(good(tilemoe_consumer_launch(&producer.ship, ctas, side)) &&
                  good(cudaEventRecord(params->end, side)))) {
    return error;
  }
  if (params->mover == Mover::sequential &&
      !good(tilemoe_consumer_launch(&producer.ship, ctas, stream))) {
    return error;
  }
  // Scale needs this rank's GEMM 2 and its peers' rows, not this rank's consumer.
  if (!good(tilemoe_scale_launch(&params->scale, stream))) return error;
  if (beside) good(cudaStreamWaitEvent(stream, params->end, 0));
  return error;
}
