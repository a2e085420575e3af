// One decoding step's attention by kernels; tensors as in cpu/decode_attention.h, on one device that has kernels.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace brorl {

// Does not wait for the device, and so does not look at what tables and lengths hold: a wrong page is read as it is.
// Query heads may share a kv head up to sixteen at a time.
void decode_attention_cuda_(
    const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
    double eps, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& keys, const at::Tensor& values,
    const at::Tensor& tables, const at::Tensor& lengths, const at::Tensor& prompt_tables,
    const at::Tensor& prompt_lengths, const at::Tensor& prompts, double scale, const at::Tensor& out);

}  // namespace brorl
