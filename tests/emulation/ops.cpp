// The torch side of csrc, compiled again with BRORL_CUDA for tensors of the emulated device. It is one file, because
// separate files take three times as long.
#include "common/gemm.h"
#include "common/uniforms.cpp"
#include "policy/advantages.cpp"
#include "policy/ppo_tokens.cpp"
#include "policy/softmax.cpp"
#include "policy/value_loss.cpp"

#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "common/device_ops.h"

namespace {

at::Tensor widened(const at::Tensor& x) {
  const auto cpu = at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
  return x.scalar_type() == at::kBFloat16 ? cpu.to(at::kFloat) : cpu;
}

}  // namespace

namespace brorl {

// Products in float32 instead of cuBLAS. tests/ops/test_cublas_gemm.py tests csrc/common/gemm.cu.
void gemm_(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  at::Tensor sum = widened(out);  // shares the memory of out, which is never bfloat16
  accumulate ? at::addmm_out(sum, sum, widened(a), widened(b)) : at::mm_out(sum, widened(a), widened(b));
}

}  // namespace brorl

TORCH_LIBRARY_IMPL(brorl, PrivateUse1, library) {
  BRORL_IMPLEMENT(library)
}
