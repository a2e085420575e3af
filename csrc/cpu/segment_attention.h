// Attention over a packed stream for training, on CPUs in float32, without the matrix of all scores (Dao et al. 2022).
// The stream consists of segments. A token attends to its segment up to itself, and to all of the segment's prefix: a
// segment that several others share. megatron_brorl/ops/fused/layers.py calls it. Results do not depend on the number
// of threads.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// qkv [T, kv_heads, heads + 2, d]: for each kv head the queries of the `heads` that share its key (Ainslie et al.
// 2023), then key and value, in the order of Megatron's projection. segments [S, 4] int64 cover the stream in order:
// first token, length, first token and length of the prefix (0: none), which is an earlier segment without a prefix.
// Returns the result [T, kv_heads, heads, d] and the logarithms of the softmax sums [T, kv_heads, heads].
std::tuple<at::Tensor, at::Tensor> segment_attention(const at::Tensor& qkv, const at::Tensor& segments, double scale);

// Return the gradient of qkv, given the gradient of that result, qkv, and both results.
at::Tensor segment_attention_gradient(
    const at::Tensor& gradient, const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& log_sums,
    const at::Tensor& segments, double scale);

}  // namespace brorl
