// Functions of the CUDA driver, by the runtime: nothing links against libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace tilemoe {

// Null if the driver has none of this name. Function: decltype(&cuSomething).
template <class Function>
Function driver_function(const char* name) {
  constexpr unsigned kVersion = 12000;  // of CUDA, whose signature is wanted
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, &result);
  const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return found ? reinterpret_cast<Function>(function) : nullptr;
}

}  // namespace tilemoe
