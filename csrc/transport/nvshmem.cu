// The only file that knows NVSHMEM.
//
// NVSHMEM is two libraries: one host library a process, and a device library with state in constant
// memory, one copy in each shared library that links it. The process starts the host library
// (nvshmem4py) and this file has it fill our copy.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "../common/launch.cuh"
#include "transport.cuh"
#include "transport.h"

using tilemoe::TransportStatus;
using tilemoe::TransportVersion;

namespace tilemoe::transport {

__device__ void put(void* destination, const void* source, int64_t bytes, int32_t rank) {
  nvshmemx_putmem_nbi_block(destination, source, static_cast<size_t>(bytes), rank);
}

__device__ void quiet() { nvshmem_quiet(); }

__device__ void add_arrivals(uint64_t* word, uint64_t rows, int32_t rank) {
  nvshmemx_signal_op(word, rows, NVSHMEM_SIGNAL_ADD, rank);
}

namespace {

constexpr int kTestThreads = 256;

__global__ void __launch_bounds__(kTestThreads)
    test_put_kernel(void* destination, const void* source, int64_t bytes, uint64_t* word,
                    int32_t rank) {
  put(destination, source, bytes, rank);
  if (threadIdx.x == 0) {
    quiet();
    add_arrivals(word, static_cast<uint64_t>(bytes), rank);
  }
}

}  // namespace
}  // namespace tilemoe::transport

void tilemoe_transport_versions(TransportVersion* device, TransportVersion* host) {
  *device = {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
             NVSHMEM_VENDOR_PATCH_VERSION};
  nvshmemx_vendor_get_version_info(&host->major, &host->minor, &host->patch);
}

TransportStatus tilemoe_transport_attach(int32_t* rank, int32_t* world) {
  // Without this look the call below would start the host library, with a bootstrap of its choice.
  if (nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED) return TransportStatus::not_started;
  // Not nvshmem_init(): that is the same call in an inline function that ends the process if it
  // fails. On a started host library it registers our state, copies it in and counts one user more.
  int provided = 0;
  const int status = nvshmemi_init_thread(
      NVSHMEM_THREAD_SERIALIZED, &provided, 0, nullptr,
      {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION});
  if (status != 0) return TransportStatus::failed;
  *rank = nvshmem_my_pe();
  *world = nvshmem_n_pes();
  return TransportStatus::ok;
}

void tilemoe_transport_detach() { nvshmem_finalize(); }

void* tilemoe_transport_peer_pointer(const void* symmetric, int32_t rank) {
  return nvshmem_ptr(symmetric, rank);
}

cudaError_t tilemoe_transport_test_put(void* destination, const void* source, int64_t bytes,
                                       uint64_t* word, int32_t rank, cudaStream_t stream) {
  if (destination == nullptr || source == nullptr || word == nullptr || bytes < 0) {
    return cudaErrorInvalidValue;
  }
  return tilemoe::launch(tilemoe::transport::test_put_kernel, 1, tilemoe::transport::kTestThreads,
                         0, stream, false, destination, source, bytes, word, rank);
}
