// The module megatron_brorl._C. Loading it registers the ops below. The files of megatron_brorl/ops/fused add autograd
// formulas.
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include "common/device_ops.h"
#include "cpu/bfloat16_gemm.h"
#include "cpu/decode_attention.h"
#include "cpu/layer_ops.h"
#include "cpu/sample_tokens.h"
#include "cpu/segment_attention.h"

TORCH_LIBRARY(brorl, library) {
  library.def("gemm_(Tensor(a!) out, Tensor a, Tensor b, bool accumulate) -> ()");
  library.def("softmax_statistics(Tensor logits, Tensor ids, int start, float temperature) -> Tensor");
  library.def(
      "softmax_gradient_(Tensor(a!) logits, Tensor ids, Tensor statistics, Tensor log_prob_gradient, "
      "Tensor? entropy_gradient, int start, float temperature, bool narrow) -> ()");
  library.def(
      "ppo_tokens(Tensor log_probs, Tensor entropy, Tensor? old, Tensor rollout, Tensor? reference, Tensor advantages, "
      "Tensor weights, str policy_loss, float[] constants, float is_cap, float kl_coef, str kl_estimator, "
      "float entropy_coef) -> (Tensor log_prob_gradient, Tensor entropy_gradient, Tensor columns)");
  library.def("uniforms(Tensor keys, Tensor index, Tensor position) -> Tensor");
  library.def(
      "sample_tokens(Tensor logits, Tensor keys, Tensor index, Tensor position, float temperature, float top_p, "
      "int top_k) -> (Tensor ids, Tensor log_probs)");
  library.def(
      "value_loss(Tensor values, Tensor old_values, Tensor returns, Tensor weights, float clip) -> "
      "(Tensor gradient, Tensor sums)");
  library.def(
      "gae(Tensor rewards, Tensor values, Tensor starts, float gamma, float lam) -> (Tensor advantages, Tensor returns)");
  library.def(
      "decode_attention_(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, "
      "Tensor(a!) keys, Tensor(b!) values, Tensor tables, Tensor lengths, Tensor prompt_tables, "
      "Tensor prompt_lengths, Tensor prompts, float scale, Tensor(c!) out) -> ()");
  library.def("add_rms_norm_(Tensor(a!) x, Tensor? delta, Tensor weight, float eps, Tensor(b!) out) -> ()");
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor out, Tensor inverse_rms)");
  library.def(
      "rms_norm_gradient_(Tensor(a!) gradient, Tensor x, Tensor weight, Tensor inverse_rms) -> "
      "(Tensor of_x, Tensor of_weight)");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
  library.def("silu_mul_gradient_(Tensor(a!) gradient, Tensor(b!) gate_up) -> ()");
  library.def("rotate_(Tensor(a!) x, Tensor cos, Tensor sin, bool inverse) -> ()");
  library.def("segment_attention(Tensor qkv, Tensor segments, float scale) -> (Tensor out, Tensor log_sums)");
  library.def(
      "segment_attention_gradient(Tensor gradient, Tensor qkv, Tensor out, Tensor log_sums, Tensor segments, "
      "float scale) -> Tensor");
  library.def("moments(Tensor values, Tensor? weights) -> Tensor");
  library.def("whiten_(Tensor(a!) values, float mean, float std) -> ()");
}

TORCH_LIBRARY_IMPL(brorl, CPU, library) {
  BRORL_IMPLEMENT(library)
  library.impl("sample_tokens", &brorl::sample_tokens);
  library.impl("decode_attention_", &brorl::decode_attention_);
  library.impl("add_rms_norm_", &brorl::add_rms_norm_);
  library.impl("rms_norm", &brorl::rms_norm);
  library.impl("rms_norm_gradient_", &brorl::rms_norm_gradient_);
  library.impl("silu_mul", &brorl::silu_mul);
  library.impl("silu_mul_gradient_", &brorl::silu_mul_gradient_);
  library.impl("rotate_", &brorl::rotate_);
  library.impl("segment_attention", &brorl::segment_attention);
  library.impl("segment_attention_gradient", &brorl::segment_attention_gradient);
}
#ifdef BRORL_CUDA
TORCH_LIBRARY_IMPL(brorl, CUDA, library) {
  BRORL_IMPLEMENT(library)
}
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
#ifdef BRORL_CUDA
  module.attr("cuda") = true;
#else
  module.attr("cuda") = false;
#endif
  module.attr("processor") = BRORL_PROCESSOR;
  module.attr("torch") = BRORL_TORCH;
  module.def("has_bfloat16_kernel", &brorl::has_bfloat16_kernel);
}
