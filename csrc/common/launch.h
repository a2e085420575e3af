// The only use of <<<>>>, so that tests/emulation can replace it by a CPU implementation.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace brorl {

// Start `blocks` > 0 blocks of `threads` each. Returns nullptr, or CUDA's error text.
template <typename... Parameters, typename... Arguments>
const char* launch_kernel(
    void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream, Arguments... arguments) {
  kernel<<<unsigned(blocks), threads, 0, stream>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace brorl
