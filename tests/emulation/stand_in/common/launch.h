// Replaces csrc/common/launch.h: the kernel runs to its end on the calling thread.
#pragma once

#include <cuda_runtime.h>

namespace brorl {

template <typename... Parameters, typename... Arguments>
const char* launch_kernel(
    void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t, Arguments... arguments) {
  return emulation::run(blocks, threads, [&] { kernel(arguments...); });
}

}  // namespace brorl
