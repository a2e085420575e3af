// Training ops between the matrix products of a transformer layer on CPUs, forward and backward, in one pass over
// memory each. megatron_brorl/ops/fused/layers.py calls them with float32, bfloat16 and float64. Sums are in float32,
// or float64 for float64. Results do not depend on the number of threads.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// x [R, H] -> x / rms(x) * weight [H] (Zhang & Sennrich 2019, eq. 4), and 1 / rms(x) [R] in the dtype of sums.
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// Return the gradients of x and of weight, given the gradient [R, H] of rms_norm's result, x, weight and 1 / rms(x).
// The result x / rms(x) * weight overwrites its gradient, because the backward pass of the next product needs it.
std::tuple<at::Tensor, at::Tensor> rms_norm_gradient_(
    at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& inverse_rms);

// gate_up [R, 2 F] -> [R, F]: silu of the first half times the second (Shazeer 2020, SwiGLU).
at::Tensor silu_mul(const at::Tensor& gate_up);

// Overwrite gate_up by its gradient, given the gradient [R, F] of the result of silu_mul. That result overwrites its
// gradient, because the backward pass of the next product needs it.
void silu_mul_gradient_(at::Tensor& gradient, at::Tensor& gate_up);

// Rotate pairs (i, i + r / 2) of the first r <= d elements of x [T, groups, heads, d] in place by the angles with cos
// and sin [T, r / 2], in the dtype of sums (Su et al. 2021, eq. 34). inverse: rotate back. The last dimension must be
// contiguous.
void rotate_(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool inverse);

}  // namespace brorl
