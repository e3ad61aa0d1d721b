// The consumer's copy loop with bulk copies (TMA) instead of loads and stores: for comparison only.
#pragma once

#include "consumer/consumer.h"

constexpr int kBulkPieceBytes = 16 << 10;

// As tilemoe_consumer_launch. `pieces` of 16 KiB in flight in a CTA's shared memory: 4, 6 or 12.
cudaError_t bulk_consumer_launch(const tilemoe::ShipParams* params, int ctas, int pieces,
                                 cudaStream_t stream);
