#include "cpu/layer_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "common/fast_exp.h"

namespace brorl {
namespace {

using at::Tensor;

template <typename T>
struct SumType {
  using Type = float;
};
template <>
struct SumType<double> {
  using Type = double;
};
template <typename T>
using Sum = typename SumType<T>::Type;

// Convert to the dtype in memory, rounding to nearest even. Loops with c10's own conversion to bfloat16 do not
// vectorise.
template <typename T>
T narrow(Sum<T> x) {
  return T(x);
}
template <>
inline c10::BFloat16 narrow<c10::BFloat16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return c10::BFloat16(uint16_t(x == x ? rounded : 0x7fc0), c10::BFloat16::from_bits());
}

at::ScalarType sum_dtype(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

void check(const Tensor& x, const char* name, at::IntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.sizes() == sizes, name, " must be ", sizes, ", got ", x.sizes());
  TORCH_CHECK_TYPE(x.scalar_type() == dtype, name, " must be ", dtype, ", got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.is_contiguous(), name, " must be contiguous");
}

void check_matrix(const Tensor& x, const char* name) {
  TORCH_CHECK_VALUE(x.dim() == 2, name, " must have two dimensions, got ", x.sizes());
  check(x, name, x.sizes(), x.scalar_type());
}

// Call run(T()) for the dtype of x.
template <typename F>
void for_dtype(const Tensor& x, const char* name, F run) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return run(0.0f);
    case at::kBFloat16:
      return run(c10::BFloat16(0));
    case at::kDouble:
      return run(0.0);
    default:
      TORCH_CHECK_TYPE(false, name, " must be float32, bfloat16 or float64, got ", x.scalar_type());
  }
}

// Call each(row) for every row, in parallel.
template <typename F>
void for_rows(int64_t rows, F each) {
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads())
  for (int64_t row = 0; row < rows; ++row) each(row);
}

// to = row * factor * w.
template <typename T>
void scale_row(const T* row, const T* w, Sum<T> factor, int64_t width, T* to) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) to[i] = narrow<T>(Sum<T>(row[i]) * factor * Sum<T>(w[i]));
}

template <typename T>
void norm_rows(const Tensor& x, const Tensor& weight, double eps, Tensor& out, Tensor& inverse_rms) {
  using S = Sum<T>;
  const int64_t width = x.size(1);
  const T *const from = x.const_data_ptr<T>(), *const w = weight.const_data_ptr<T>();
  T* const to = out.mutable_data_ptr<T>();
  S* const factors = inverse_rms.mutable_data_ptr<S>();
  for_rows(x.size(0), [&](int64_t r) {
    const T* const row = from + r * width;
    S square = 0;
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < width; ++i) square += S(row[i]) * S(row[i]);
    const S factor = 1 / std::sqrt(square / S(width) + S(eps));
    factors[r] = factor;
    scale_row(row, w, factor, width, to + r * width);
  });
}

// n = x / rms(x); x_grad = (g w - n mean(g w n)) / rms(x); weight_grad = sum over rows of g n; n w overwrites g [R, H].
template <typename T>
void norm_gradient_rows(
    Tensor& gradient, const Tensor& x, const Tensor& weight, const Tensor& inverse_rms, Tensor& x_grad,
    Tensor& weight_grad) {
  using S = Sum<T>;
  constexpr int64_t kBlock = 256;  // rows whose part of weight_grad one thread sums
  const int64_t rows = x.size(0), width = x.size(1), blocks = (rows + kBlock - 1) / kBlock;
  const T *const from = x.const_data_ptr<T>(), *const w = weight.const_data_ptr<T>();
  T* const g = gradient.mutable_data_ptr<T>();
  const S* const factors = inverse_rms.const_data_ptr<S>();
  T *const to = x_grad.mutable_data_ptr<T>(), *const total = weight_grad.mutable_data_ptr<T>();
  std::vector<S> parts(blocks * width);
  for_rows(blocks, [&](int64_t block) {
    S* const part = parts.data() + block * width;
    for (int64_t r = block * kBlock; r < std::min(rows, (block + 1) * kBlock); ++r) {
      const T* const row = from + r * width;
      T *const upstream = g + r * width, *const result = to + r * width;
      const S factor = factors[r];
      S dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < width; ++i) {
        const S product = S(upstream[i]) * S(row[i]);
        part[i] += product * factor;
        dot += product * S(w[i]);
      }
      const S shift = dot * factor * factor * factor / S(width);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) result[i] = narrow<T>(S(upstream[i]) * S(w[i]) * factor - S(row[i]) * shift);
      scale_row(row, w, factor, width, upstream);
    }
  });
  for (int64_t block = 1; block < blocks; ++block) {
    for (int64_t i = 0; i < width; ++i) parts[i] += parts[block * width + i];
  }
  for (int64_t i = 0; i < width; ++i) total[i] = narrow<T>(blocks ? parts[i] : S(0));
}

// Sigmoid by exp of the negative magnitude, which cannot overflow: 1 / (1 + e^-x) = e^x / (1 + e^x) for x < 0.
template <typename S>
S sigmoid(S x) {
  const S e = fast_exp(-std::fabs(x));
  return (x < 0 ? e : S(1)) / (1 + e);
}

template <typename T>
void silu_rows(const Tensor& gate_up, Tensor& out) {
  using S = Sum<T>;
  const int64_t width = out.size(1);
  const T* const from = gate_up.const_data_ptr<T>();
  T* const to = out.mutable_data_ptr<T>();
  for_rows(out.size(0), [&](int64_t r) {
    const T *const gate = from + 2 * r * width, *const up = gate + width;
    T* const result = to + r * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const S x = S(gate[i]);
      result[i] = narrow<T>(x * sigmoid(x) * S(up[i]));
    }
  });
}

// d silu(x) / dx = s (1 + x (1 - s)) with s = sigmoid(x). The gradients overwrite gate and up, and silu(gate) up
// overwrites the upstream gradient.
template <typename T>
void silu_gradient_rows(Tensor& gradient, Tensor& gate_up) {
  using S = Sum<T>;
  const int64_t width = gradient.size(1);
  T *const values = gate_up.mutable_data_ptr<T>(), *const g = gradient.mutable_data_ptr<T>();
  for_rows(gradient.size(0), [&](int64_t r) {
    T *const gate = values + 2 * r * width, *const up = gate + width, *const upstream = g + r * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const S x = S(gate[i]), s = sigmoid(x), d = S(upstream[i]), u = S(up[i]);
      gate[i] = narrow<T>(d * u * s * (1 + x * (1 - s)));
      up[i] = narrow<T>(d * x * s);
      upstream[i] = narrow<T>(x * s * u);
    }
  });
}

template <typename T>
void rotate_rows(Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse) {
  using S = Sum<T>;
  const int64_t heads = x.size(2), half = cos.size(1);
  T* const to = x.mutable_data_ptr<T>();
  const S sign = inverse ? S(-1) : S(1);
  for_rows(x.size(0), [&](int64_t t) {
    const S *const c = cos.const_data_ptr<S>() + t * half, *const s = sin.const_data_ptr<S>() + t * half;
    for (int64_t h = 0; h < x.size(1) * heads; ++h) {
      T* const row = to + t * x.stride(0) + h / heads * x.stride(1) + h % heads * x.stride(2);
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const S a = S(row[i]), b = S(row[half + i]), turn = sign * s[i];
        row[i] = narrow<T>(a * c[i] - b * turn);
        row[half + i] = narrow<T>(b * c[i] + a * turn);
      }
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_matrix(x, "x");
  check(weight, "weight", {x.size(1)}, x.scalar_type());
  Tensor out = at::empty(x.sizes(), x.options());
  Tensor inverse_rms = at::empty({x.size(0)}, x.options().dtype(sum_dtype(x)));
  for_dtype(x, "x", [&](auto zero) { norm_rows<decltype(zero)>(x, weight, eps, out, inverse_rms); });
  return {out, inverse_rms};
}

std::tuple<Tensor, Tensor> rms_norm_gradient_(
    Tensor& gradient, const Tensor& x, const Tensor& weight, const Tensor& inverse_rms) {
  check_matrix(x, "x");
  check(weight, "weight", {x.size(1)}, x.scalar_type());
  check(gradient, "gradient", x.sizes(), x.scalar_type());
  check(inverse_rms, "inverse_rms", {x.size(0)}, sum_dtype(x));
  Tensor x_grad = at::empty(x.sizes(), x.options()), weight_grad = at::empty(weight.sizes(), weight.options());
  for_dtype(x, "x", [&](auto zero) {
    norm_gradient_rows<decltype(zero)>(gradient, x, weight, inverse_rms, x_grad, weight_grad);
  });
  return {x_grad, weight_grad};
}

Tensor silu_mul(const Tensor& gate_up) {
  check_matrix(gate_up, "gate_up");
  TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gate_up must be [R, 2 F], got ", gate_up.sizes());
  Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  for_dtype(gate_up, "gate_up", [&](auto zero) { silu_rows<decltype(zero)>(gate_up, out); });
  return out;
}

void silu_mul_gradient_(Tensor& gradient, Tensor& gate_up) {
  check_matrix(gradient, "gradient");
  check(gate_up, "gate_up", {gradient.size(0), 2 * gradient.size(1)}, gradient.scalar_type());
  for_dtype(gate_up, "gate_up", [&](auto zero) { silu_gradient_rows<decltype(zero)>(gradient, gate_up); });
}

void rotate_(Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse) {
  TORCH_CHECK_VALUE(
      x.dim() == 4 && (x.stride(3) == 1 || x.numel() == 0), "x must be [T, groups, heads, d], d contiguous, got ",
      x.sizes());
  TORCH_CHECK_VALUE(
      cos.dim() == 2 && 2 * cos.size(1) <= x.size(3), "cos must be [T, r / 2] with r up to ", x.size(3), ", got ",
      cos.sizes());
  check(cos, "cos", {x.size(0), cos.size(1)}, sum_dtype(x));
  check(sin, "sin", cos.sizes(), sum_dtype(x));
  for_dtype(x, "x", [&](auto zero) { rotate_rows<decltype(zero)>(x, cos, sin, inverse); });
}

}  // namespace brorl
