#include "common/gemm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include "common/cuda_launch.h"
#include "common/gemm_cuda.h"
#include "cpu/bfloat16_gemm.h"
#include "cpu/float_gemm.h"

namespace brorl {
namespace {

// Return the stride of a dimension, or 1 if its size is 1. Torch's stride is arbitrary then, and the kernels need one
// dimension with a stride of 1.
int64_t stride(const at::Tensor& x, int64_t dim) { return x.size(dim) == 1 ? 1 : x.stride(dim); }

bool has_unit_stride(const at::Tensor& x) { return stride(x, 0) == 1 || stride(x, 1) == 1; }

template <typename T>
Matrix<T> operand(const at::Tensor& x) {
  return {static_cast<const T*>(x.const_data_ptr()), stride(x, 0), stride(x, 1)};
}

}  // namespace

void gemm_(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  TORCH_CHECK_VALUE(
      out.dim() == 2 && a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && out.size(0) == a.size(0) &&
          out.size(1) == b.size(1),
      "gemm_: cannot write ", a.sizes(), " times ", b.sizes(), " to ", out.sizes());
  const bool is_bfloat16 = a.scalar_type() == at::kBFloat16;
  const auto out_type = is_bfloat16 ? at::kFloat : a.scalar_type();
  TORCH_CHECK_TYPE(
      b.scalar_type() == a.scalar_type() && out.scalar_type() == out_type, "gemm_: cannot multiply ", a.scalar_type(),
      " by ", b.scalar_type(), " to ", out.scalar_type());
  TORCH_CHECK_VALUE(
      stride(out, 1) == 1 && has_unit_stride(a) && has_unit_stride(b),
      "gemm_: out must be row-major, and each operand needs a dimension of stride 1");
  if (out.numel() == 0) return;
  if (a.size(1) == 0) {
    if (!accumulate) out.zero_();
    return;
  }
#ifdef BRORL_CUDA
  if (is_bfloat16 && on_device(out)) {
    const c10::DeviceGuard guard(out.device());
    check_launch("gemm_", bfloat16_gemm_launch(
        out.mutable_data_ptr<float>(), out.stride(0), operand<uint16_t>(a), operand<uint16_t>(b), out.size(0),
        out.size(1), a.size(1), accumulate, out.device().index(), current_stream(out)));
    return;
  }
#endif
  if (is_bfloat16) {
    TORCH_CHECK(has_bfloat16_kernel(), "gemm_: this processor or this torch cannot multiply bfloat16 to float32");
    bfloat16_gemm(
        out.mutable_data_ptr<float>(), out.stride(0), operand<uint16_t>(a), operand<uint16_t>(b), out.size(0),
        out.size(1), a.size(1), accumulate);
  } else if (out.is_cpu() && a.scalar_type() == at::kFloat && prefers_float_gemm()) {
    float_gemm(
        out.mutable_data_ptr<float>(), out.stride(0), operand<float>(a), operand<float>(b), out.size(0), out.size(1),
        a.size(1), accumulate);
  } else {
    accumulate ? at::addmm_out(out, out, a, b) : at::mm_out(out, a, b);
  }
}

}  // namespace brorl
