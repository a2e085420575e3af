// Attention over a packed stream while it is trained, on CPUs in float32, without the matrix of all scores (Dao et al.
// 2022). The stream holds segments; a token attends to its segment up to itself, and to all of the segment's prefix,
// another segment that stands once in the stream for all that share it. megatron_brorl/ops/fused/layers.py calls it.
// Results do not depend on the number of threads.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// qkv [T, kv_heads, heads + 2, d]: for each kv head the queries of the `heads` that share its key (Ainslie et al. 2023),
// then key and value, as Megatron's projection gives them. segments [S, 4] int64 cover the stream in order: first token,
// tokens, first token of the prefix, tokens of the prefix (0: none), an earlier segment without one. Returns the result
// [T, kv_heads, heads, d] and the logarithms of the softmax sums [T, kv_heads, heads].
std::tuple<at::Tensor, at::Tensor> segment_attention(const at::Tensor& qkv, const at::Tensor& segments, double scale);

// From the gradient of that result, its operand and what it returned: the gradient of qkv.
at::Tensor segment_attention_gradient(
    const at::Tensor& gradient, const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& log_sums,
    const at::Tensor& segments, double scale);

}  // namespace brorl
