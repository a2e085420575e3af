// Checks that the elementwise ops share. Each returns the tensor as contiguous memory or raises an error that names it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace brorl {

// For the first tensor of an op. `matching` compares the others with it.
inline at::Tensor floating(const at::Tensor& x, const char* name) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble, name, " must be float32 or float64 (widen it first), got ", dtype);
  return x.contiguous();
}

inline at::Tensor floating_vector(const at::Tensor& x, const char* name, const char* shape) {
  TORCH_CHECK_VALUE(x.dim() == 1, name, " must be ", shape, ", got ", x.sizes());
  return floating(x, name);
}

inline at::Tensor matching(
    const at::Tensor& x, const char* name, at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& first) {
  TORCH_CHECK_VALUE(x.sizes() == sizes, name, " must be ", sizes, ", got ", x.sizes());
  TORCH_CHECK_TYPE(x.scalar_type() == dtype, name, " must be ", dtype, ", got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.device() == first.device(), name, " must be on ", first.device(), ", is on ", x.device());
  return x.contiguous();
}

// Call f(S()) with the element type S of the tensor.
template <typename F>
void with_type(const at::Tensor& x, const F& f) {
  x.scalar_type() == at::kDouble ? f(double()) : f(float());
}

}  // namespace brorl
