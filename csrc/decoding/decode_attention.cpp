// The op around decode_attention.cu: checks and workspace.
#ifdef BRORL_CUDA
#include "decoding/decode_attention.h"

#include <ATen/ops/empty.h>

#include "common/cuda_launch.h"
#include "common/tensor_checks.h"
#include "decoding/decode_attention_cuda.h"
#include "decoding/decode_shapes.h"

namespace brorl {

using at::Tensor;

void decode_attention_cuda_(
    const Tensor& qkv, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps,
    const Tensor& cos, const Tensor& sin, const Tensor& keys, const Tensor& values, const Tensor& tables,
    const Tensor& lengths, const Tensor& prompt_tables, const Tensor& prompt_lengths, const Tensor& prompts,
    double scale, const Tensor& out) {
  const DecodeShapes s = check_decode_step(
      qkv, q_norm, k_norm, cos, sin, keys, values, tables, lengths, prompt_tables, prompt_lengths, prompts, out);
  TORCH_CHECK_VALUE(
      s.heads / s.kv_heads <= kQueriesAtOnce, s.heads / s.kv_heads, " query heads share a kv head, the kernel takes ",
      kQueriesAtOnce);
  if (!s.rows) return;
  const c10::DeviceGuard guard(qkv.device());
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    DecodeStep<T> step{
        static_cast<const T*>(qkv.const_data_ptr()), q_norm ? q_norm->const_data_ptr<float>() : nullptr,
        k_norm ? k_norm->const_data_ptr<float>() : nullptr, cos.const_data_ptr<float>(), sin.const_data_ptr<float>(),
        static_cast<T*>(keys.mutable_data_ptr()), static_cast<T*>(values.mutable_data_ptr()),
        tables.const_data_ptr<int32_t>(), prompt_tables.const_data_ptr<int32_t>(), lengths.const_data_ptr<int64_t>(),
        prompt_lengths.const_data_ptr<int64_t>(), prompts.const_data_ptr<int64_t>(),
        static_cast<T*>(out.mutable_data_ptr()), s.rows, s.heads, s.kv_heads, s.d, s.width, tables.size(1),
        prompt_tables.size(1), float(scale), float(eps), nullptr, nullptr, nullptr};
    const int64_t chunks = step.prompt_chunks() + step.own_chunks();
    const auto options = qkv.options().dtype(at::kFloat);
    const Tensor queries = at::empty({s.rows, s.heads, s.d}, options);
    const Tensor sums = at::empty({s.rows, s.heads, chunks, 2}, options);
    const Tensor totals = at::empty({s.rows, s.heads, chunks, s.d}, options);
    step.queries = queries.mutable_data_ptr<float>();
    step.sums = sums.mutable_data_ptr<float>();
    step.totals = totals.mutable_data_ptr<float>();
    check_launch("decode_attention_", decode_attention_launch(step, current_stream(qkv)));
  };
  qkv.scalar_type() == at::kFloat ? run(0.0f) : run(uint16_t(0));
}

}  // namespace brorl
#endif
