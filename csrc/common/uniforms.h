// The random numbers of sampled tokens; megatron_brorl/ops/philox.py defines them.
#pragma once

#include <ATen/core/Tensor.h>

namespace brorl {

// keys (63 bits), rollout index and token position (32 bits each), [B] int64 -> [B] float64 in (0, 1), on any device.
at::Tensor uniforms(const at::Tensor& keys, const at::Tensor& index, const at::Tensor& position);

}  // namespace brorl
