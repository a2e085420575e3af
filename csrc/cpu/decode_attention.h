// Attention of one decoding step over [shared prompt | own suffix] with paged keys and values, and small ops around it,
// on CPUs. megatron_brorl/ops/reference/decode.py defines them.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace brorl {

// B rows with one new token each; K kv heads, heads = g K query heads, d head size, 16 tokens per page. qkv [B, (heads
// + 2 K) d], float32 or bfloat16: a row's projections, before normalization (q_norm, k_norm [d]) and rotation (cos, sin
// [B, d / 2] float32). The new key and value are stored at position lengths[b] - 1 of row b's own pages. Then query
// heads attend to the row's prompt and to its lengths[b] own tokens. keys [pages, K, d, 16] and values [pages, K, 16,
// d'] (d padded to d') in the dtype of qkv; tables [B, pages of a row] and prompt_tables [S, pages of a
// prompt] int32; prompt_lengths [S] and prompts [B], the row's prompt, int64. It is fastest if rows of one prompt are
// adjacent. out [B, heads d].
void decode_attention_(
    const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
    double eps, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& keys, const at::Tensor& values,
    const at::Tensor& tables, const at::Tensor& lengths, const at::Tensor& prompt_tables,
    const at::Tensor& prompt_lengths, const at::Tensor& prompts, double scale, const at::Tensor& out);

// x [B, H] += delta if there is one, and out = x / rms(x) * weight [H] (Zhang & Sennrich 2019, eq. 4).
void add_rms_norm_(
    const at::Tensor& x, const std::optional<at::Tensor>& delta, const at::Tensor& weight, double eps,
    const at::Tensor& out);

}  // namespace brorl
