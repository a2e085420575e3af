#include "gemm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include "bfloat16_gemm.h"

namespace brorl {
namespace {

BFloat16Matrix operand(const at::Tensor& x) {
  // A dimension of size 1 may have any stride; the kernel wants a 1 in one of the two.
  const int64_t row = x.size(0) == 1 ? 1 : x.stride(0), column = x.size(1) == 1 ? 1 : x.stride(1);
  TORCH_CHECK_VALUE(row == 1 || column == 1, "gemm_: a bfloat16 matrix needs a dimension of stride 1");
  return {static_cast<const uint16_t*>(x.const_data_ptr()), row, column};
}

}  // namespace

void gemm_(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  TORCH_CHECK_VALUE(
      out.dim() == 2 && a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && out.size(0) == a.size(0) &&
          out.size(1) == b.size(1),
      "gemm_: cannot write ", a.sizes(), " times ", b.sizes(), " to ", out.sizes());
  const bool narrow = a.scalar_type() == at::kBFloat16;
  const auto expected = narrow ? at::kFloat : a.scalar_type();
  TORCH_CHECK_TYPE(
      b.scalar_type() == a.scalar_type() && out.scalar_type() == expected, "gemm_: cannot multiply ", a.scalar_type(),
      " by ", b.scalar_type(), " to ", out.scalar_type());
  if (out.numel() == 0) return;
  if (a.size(1) == 0) {
    if (!accumulate) out.zero_();
    return;
  }
  if (!narrow) {
    accumulate ? at::addmm_out(out, out, a, b) : at::mm_out(out, a, b);
    return;
  }
#ifdef BRORL_CUDA
  if (out.is_cuda()) {
    accumulate ? at::addmm_out(out, out, a, b, at::kFloat) : at::mm_out(out, a, b, at::kFloat);
    return;
  }
#endif
  TORCH_CHECK_VALUE(out.stride(1) == 1 || out.size(1) == 1, "gemm_: out must be row-major");
  TORCH_CHECK(has_bfloat16_kernel(), "gemm_: neither this processor nor this torch multiplies bfloat16 to float32");
  bfloat16_gemm(
      out.mutable_data_ptr<float>(), out.stride(0), operand(a), operand(b), out.size(0), out.size(1), a.size(1),
      accumulate);
}

}  // namespace brorl
