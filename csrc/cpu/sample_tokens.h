// Sampling of the next token with keyed random numbers. megatron_brorl/ops/reference/sampling.py defines the op.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace brorl {

// logits [B, V] float32 or bfloat16; keys, index and position [B] int64. Returns ids [B] int64 and their log-probs [B]
// float32 under the distribution they were drawn from.
std::tuple<at::Tensor, at::Tensor> sample_tokens(
    const at::Tensor& logits, const at::Tensor& keys, const at::Tensor& index, const at::Tensor& position,
    double temperature, double top_p, int64_t top_k);

}  // namespace brorl
