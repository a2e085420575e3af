// How .cu files start kernels: the only place of <<<>>>, so that tests/emulation can put a CPU behind it.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace brorl {

// blocks > 0, of `threads` each. Null, or what CUDA says went wrong.
template <typename... Parameters, typename... Arguments>
const char* launch_kernel(
    void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream, Arguments... arguments) {
  kernel<<<unsigned(blocks), threads, 0, stream>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace brorl
