// C ABI of the transport: the host side of what kernels need of the library that makes memory
// symmetric. That library is named in one file only, the .cu beside this header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../consumer/consumer.h"

namespace tilemoe {

enum class TransportStatus : int32_t {
  ok = 0,
  not_started = 1,  // the host library that this one is bound to has not been started
  failed = 2,       // the host library refused; it has printed why
};

struct TransportVersion {
  int32_t major;
  int32_t minor;
  int32_t patch;
};

}  // namespace tilemoe

extern "C" {

// Version of the headers and device library that this library was made with, and of the host
// library that the loader bound it to. Needs neither a GPU nor a started host library.
void tilemoe_transport_versions(tilemoe::TransportVersion* device, tilemoe::TransportVersion* host);

// Fills this library's own copy of the device state, once the host library has been started by
// whoever owns it (ds_tilemoe/transport.py). The device must be the current one. Local.
tilemoe::TransportStatus tilemoe_transport_attach(int32_t* rank, int32_t* world);

// Undoes attach; before the owner ends the host library. Local.
void tilemoe_transport_detach();

// Where `rank`'s copy of `symmetric` is mapped here, or null: then only puts reach it.
void* tilemoe_transport_peer_pointer(const void* symmetric, int32_t rank);

// Self-test: one CTA puts `bytes` from `source` (any device memory) to `rank`'s copy of the
// symmetric `destination` and then adds `bytes` to its copy of the symmetric `word`.
cudaError_t tilemoe_transport_test_put(void* destination, const void* source, int64_t bytes,
                                       uint64_t* word, int32_t rank, cudaStream_t stream);

// Loads the kernel below on the current device: once, at start-up. Needs no started host library.
cudaError_t tilemoe_put_consumer_load();

// The consumer kernel of Transport::put: as tilemoe_consumer_launch, but rows and arrivals go by
// puts, to `pes[owner]` (device, [W]) and the places that this rank's own block has for them, so
// the blocks of a group lie at equal symmetric addresses. `last` = 1: it runs behind the producer
// and ships what is left, whatever the split. No other kernel of the call may ship: an arrival word
// takes one path.
cudaError_t tilemoe_put_consumer_launch(const tilemoe::ShipParams* params, const int32_t* pes,
                                        int32_t ctas, int32_t last, cudaStream_t stream);
}
