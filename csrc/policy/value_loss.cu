#include "policy/partial_moments.h"
#include "policy/value_loss_math.h"

namespace brorl {
namespace {

template <typename S>
__global__ void value_loss_kernel(ValuePointers<S> pointers, S clip, int64_t rows, S* gradient, double* table) {
  S targets[kPerThread], residuals[kPerThread];
  Partial<2, 2> partial{};
  static_assert(partial.kWidth == kValueSums);
  unsigned included = 0;  // bit k: the k-th token exists and its weight is not 0
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = token_index(k);
    targets[k] = residuals[k] = 0;
    if (i >= rows) continue;
    const S value = pointers.values[i], target = pointers.returns[i], weight = pointers.weights[i];
    const ValueToken<S> token = value_loss_of(value, pointers.old_values[i], target, weight, clip);
    gradient[i] = token.gradient;
    targets[k] = target;
    residuals[k] = target - value;
    partial.x[5] += double(token.loss);  // after the count and two moments of two columns
    partial.x[6] += token.clipped;
    included |= unsigned(weight != 0) << k;
  }
  set_moments(partial, 0, targets, included);
  set_moments(partial, 1, residuals, included);
  write_block(partial, table);
}

}  // namespace

template <typename S>
const char* value_loss_launch(
    ValuePointers<S> pointers, S clip, int64_t rows, S* gradient, double* table, CUstream_st* stream) {
  return reduce_tokens<2, 2>(value_loss_kernel<S>, rows, table, stream, pointers, clip, rows, gradient);
}

template const char* value_loss_launch<float>(ValuePointers<float>, float, int64_t, float*, double*, CUstream_st*);
template const char* value_loss_launch<double>(ValuePointers<double>, double, int64_t, double*, double*, CUstream_st*);

}  // namespace brorl
