// The stream that torch currently uses on a CUDA tensor's device. Only CUDA builds include this file.
#pragma once

#include <ATen/core/Tensor.h>
// Unlike ATen/cuda/CUDAContext.h, this header does not need cublas_v2.h, which some CUDA installations lack.
#include <c10/cuda/CUDAStream.h>

namespace brorl {

inline cudaStream_t current_stream(const at::Tensor& x) {
  return c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
}

}  // namespace brorl
