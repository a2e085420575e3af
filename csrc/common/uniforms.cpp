#include "common/uniforms.h"

#include <ATen/ops/empty.h>

#include "common/cuda_launch.h"
#include "common/philox.h"
#include "common/tensor_checks.h"
#include "common/uniforms_cuda.h"

namespace brorl {

at::Tensor uniforms(const at::Tensor& keys, const at::Tensor& index, const at::Tensor& position) {
  const at::Tensor k = matching(keys, "keys", keys.sizes(), at::kLong, keys);
  const at::Tensor i = matching(index, "index", keys.sizes(), at::kLong, keys);
  const at::Tensor p = matching(position, "position", keys.sizes(), at::kLong, keys);
  const at::Tensor result = at::empty(keys.sizes(), keys.options().dtype(at::kDouble));
  const auto *key = k.const_data_ptr<int64_t>(), *rollout = i.const_data_ptr<int64_t>();
  const auto* token = p.const_data_ptr<int64_t>();
  double* const out = result.mutable_data_ptr<double>();
#ifdef BRORL_CUDA
  if (on_device(keys)) {
    const c10::DeviceGuard guard(keys.device());
    check_launch("uniforms", uniforms_launch(key, rollout, token, keys.numel(), out, current_stream(keys)));
    return result;
  }
#endif
  for (int64_t r = 0; r < keys.numel(); ++r) out[r] = philox_uniform(key[r], rollout[r], token[r]);
  return result;
}

}  // namespace brorl
