#include "gemm.h"

#include <algorithm>

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

// MKL's prototype with its enums and MKL_INT (LP64) as int. Weak: null where torch was built without MKL.
extern "C" __attribute__((weak)) void cblas_gemm_bf16bf16f32(
    int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const uint16_t* a, int lda,
    const uint16_t* b, int ldb, float beta, float* c, int ldc);

namespace brorl {
namespace {

constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;

struct Operand {
  const uint16_t* data;
  int transpose, leading;
};

Operand operand(const at::Tensor& x) {
  const auto* data = static_cast<const uint16_t*>(x.const_data_ptr());
  // A dimension of size 1 may have any stride, which BLAS would refuse as a leading one.
  if (x.stride(1) == 1 || x.numel() == 1) return {data, kNoTranspose, int(std::max(x.stride(0), x.size(1)))};
  TORCH_INTERNAL_ASSERT(x.stride(0) == 1);
  return {data, kTranspose, int(std::max(x.stride(1), x.size(0)))};
}

}  // namespace

bool bfloat16_gemm() { return cblas_gemm_bf16bf16f32 != nullptr; }

void gemm(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  if (a.scalar_type() == at::kBFloat16) {
    const Operand left = operand(a), right = operand(b);
    cblas_gemm_bf16bf16f32(
        kRowMajor, left.transpose, right.transpose, int(a.size(0)), int(b.size(1)), int(a.size(1)), 1.0f, left.data,
        left.leading, right.data, right.leading, accumulate ? 1.0f : 0.0f, out.mutable_data_ptr<float>(),
        int(out.stride(0)));
  } else if (accumulate) {
    at::addmm_out(out, out, a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

}  // namespace brorl
