// What one decoding step's attention is given, on whatever device: the checks of cpu/decode_attention.cpp and of the
// op with kernels.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace brorl {

struct DecodeShapes {
  int64_t rows, pages, kv_heads, heads, d, width;
};

inline void check_decode(const at::Tensor& x, const char* name, at::IntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.sizes() == sizes, name, " must be ", sizes, ", got ", x.sizes());
  TORCH_CHECK_TYPE(x.scalar_type() == dtype, name, " must be ", dtype, ", got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.is_contiguous(), name, " must be contiguous");
}

inline void check_decode_dtype(const at::Tensor& x, const char* name) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16, name, " must be float32 or bfloat16, got ", dtype);
}

// Raises one error that names the tensor which does not fit. What tables and lengths hold is not looked at.
inline DecodeShapes check_decode_step(
    const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
    const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& keys, const at::Tensor& values,
    const at::Tensor& tables, const at::Tensor& lengths, const at::Tensor& prompt_tables,
    const at::Tensor& prompt_lengths, const at::Tensor& prompts, const at::Tensor& out) {
  constexpr int64_t kPage = 16, kWidest = 256;
  check_decode_dtype(qkv, "qkv");
  const auto dtype = qkv.scalar_type();
  TORCH_CHECK_VALUE(
      qkv.dim() == 2 && keys.dim() == 4 && keys.size(3) == kPage && values.dim() == 4 && tables.dim() == 2 &&
          prompt_tables.dim() == 2 && prompt_lengths.dim() == 1 && out.dim() == 2,
      "qkv must be [B, (heads + 2 K) d], keys [pages, K, d, 16], values [pages, K, 16, d], tables [B, n], "
      "prompt_tables [S, n], prompt_lengths [S], out [B, heads d]");
  const int64_t rows = qkv.size(0), pages = keys.size(0), kv_heads = keys.size(1), d = keys.size(2);
  const int64_t width = values.size(3), heads = d ? out.size(1) / d : 0;
  TORCH_CHECK_VALUE(
      d > 0 && d % 2 == 0 && d <= width && width % kPage == 0 && width <= kWidest, "a head has ", d, " in ", width,
      " places: an even size in a multiple of 16 up to ", kWidest, " is needed");
  TORCH_CHECK_VALUE(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, heads, " heads do not share ", kv_heads);
  check_decode(qkv, "qkv", {rows, (heads + 2 * kv_heads) * d}, dtype);
  check_decode(cos, "cos", {rows, d / 2}, at::kFloat);
  check_decode(sin, "sin", {rows, d / 2}, at::kFloat);
  check_decode(keys, "keys", {pages, kv_heads, d, kPage}, dtype);
  check_decode(values, "values", {pages, kv_heads, kPage, width}, dtype);
  check_decode(tables, "tables", {rows, tables.size(1)}, at::kInt);
  check_decode(lengths, "lengths", {rows}, at::kLong);
  check_decode(prompt_tables, "prompt_tables", {prompt_lengths.size(0), prompt_tables.size(1)}, at::kInt);
  check_decode(prompt_lengths, "prompt_lengths", prompt_lengths.sizes(), at::kLong);
  check_decode(prompts, "prompts", {rows}, at::kLong);
  check_decode(out, "out", {rows, heads * d}, dtype);
  if (q_norm) check_decode(*q_norm, "q_norm", {d}, at::kFloat);
  if (k_norm) check_decode(*k_norm, "k_norm", {d}, at::kFloat);
  return {rows, pages, kv_heads, heads, d, width};
}

}  // namespace brorl
