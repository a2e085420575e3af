#include "common/launch.h"
#include "policy/value_loss_math.h"

namespace brorl {
namespace {

constexpr int kThreads = 256;

template <typename S>
__global__ void value_loss_kernel(ValuePointers<S> pointers, S clip, int64_t rows) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < rows) value_loss_at(i, pointers, clip);
}

}  // namespace

template <typename S>
const char* value_loss_launch(ValuePointers<S> pointers, S clip, int64_t rows, CUstream_st* stream) {
  if (rows == 0) return nullptr;
  return launch_kernel(value_loss_kernel<S>, (rows + kThreads - 1) / kThreads, kThreads, stream, pointers, clip, rows);
}

template const char* value_loss_launch<float>(ValuePointers<float>, float, int64_t, CUstream_st*);
template const char* value_loss_launch<double>(ValuePointers<double>, double, int64_t, CUstream_st*);

}  // namespace brorl
