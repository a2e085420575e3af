// What stands between the matrix products of a transformer layer while it is trained, forward and backward, in one pass
// over memory each. megatron_brorl/ops/fused/layers.py calls them. On CPUs alone, in float32, bfloat16 and float64; sums are
// in float32, or float64 for float64. Results do not depend on the number of threads.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// x [R, H] -> x / rms(x) * weight [H] (Zhang & Sennrich 2019, eq. 4), and 1 / rms(x) [R] in the dtype of sums.
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// From the gradient [R, H] of that result, x, weight and 1 / rms(x): the gradients of x and of weight. x / rms(x) * weight
// is written over the gradient, for a product whose other operand it was.
std::tuple<at::Tensor, at::Tensor> rms_norm_gradient_(
    at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& inverse_rms);

// gate_up [R, 2 F] -> [R, F]: silu of the first half times the second (Shazeer 2020, SwiGLU).
at::Tensor silu_mul(const at::Tensor& gate_up);

// From the gradient [R, F] of that result and gate_up: the gradient of gate_up, which is written over gate_up. The result
// itself is written over the gradient, for a product whose other operand it was.
void silu_mul_gradient_(at::Tensor& gradient, at::Tensor& gate_up);

// x [T, groups, heads, d], the last dimension contiguous: pairs (i, i + r / 2) of its first r <= d places are turned in
// place by the angles whose cos and sin [T, r / 2] are given in the dtype of sums (Su et al. 2021, eq. 34); backwards by
// the same angles if inverse.
void rotate_(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool inverse);

}  // namespace brorl
