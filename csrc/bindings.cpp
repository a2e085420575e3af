// The module megatron_brorl._C: loading it registers the ops below. megatron_brorl/ops/fused.py adds what torch.library
// takes from Python: the fake implementations and the autograd formula.
#include <torch/extension.h>
#include <torch/library.h>

#include "gemm.h"
#include "linear_ppo_loss.h"

TORCH_LIBRARY(brorl, library) {
  library.def(
      "linear_ppo_loss(Tensor hidden, Tensor weight, Tensor ids, Tensor? old_log_probs, Tensor rollout_log_probs, "
      "Tensor advantages, float divisor, float eps_low, float eps_high, float is_cap, float temperature, "
      "bool hidden_gradient, bool weight_gradient) -> (Tensor loss, Tensor log_probs, Tensor entropy, "
      "Tensor counters, Tensor grad_hidden, Tensor grad_weight)");
  library.def(
      "linear_log_probs(Tensor hidden, Tensor weight, Tensor ids, float temperature) -> "
      "(Tensor log_probs, Tensor entropy)");
}

TORCH_LIBRARY_IMPL(brorl, CPU, library) {
  library.impl("linear_ppo_loss", &brorl::linear_ppo_loss_cpu);
  library.impl("linear_log_probs", &brorl::linear_log_probs_cpu);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
#ifdef BRORL_CUDA
  module.attr("cuda") = true;
#else
  module.attr("cuda") = false;
#endif
  module.def("bfloat16_gemm", &brorl::bfloat16_gemm, "Whether bfloat16 products keep float32 results here (MKL).");
}
