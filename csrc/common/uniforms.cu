// One thread per row, because in torch operations a Philox block takes 300 kernels.
#include "common/uniforms_cuda.h"

#include "common/launch.h"
#include "common/philox.h"

namespace brorl {
namespace {

constexpr int kThreads = 128;

__global__ void uniforms_kernel(
    const int64_t* keys, const int64_t* index, const int64_t* position, int64_t rows, double* result) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < rows) result[i] = philox_uniform(keys[i], index[i], position[i]);
}

}  // namespace

const char* uniforms_launch(
    const int64_t* keys, const int64_t* index, const int64_t* position, int64_t rows, double* result,
    cudaStream_t stream) {
  if (!rows) return nullptr;
  return launch_kernel(
      uniforms_kernel, (rows + kThreads - 1) / kThreads, kThreads, stream, keys, index, position, rows, result);
}

}  // namespace brorl
