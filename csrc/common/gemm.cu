// Products of bfloat16 matrices with float32 results by cuBLAS. torch has them from 2.8 on, and from 2.10 on also adds
// them to a float32 matrix. This file has no device code.
#include "common/gemm_cuda.h"

#include <climits>
#include <unordered_map>

#include <cublas_v2.h>

namespace brorl {
namespace {

// A row-major matrix for cuBLAS, which is column-major: passed as its transpose.
struct Operand {
  cublasOperation_t op;
  int64_t ld;
};

// The row stride of a matrix with one row is arbitrary, and cuBLAS accepts any that is large enough; likewise columns.
Operand operand(const Matrix<uint16_t>& x, int64_t rows, int64_t columns) {
  if (x.column_stride == 1) return {CUBLAS_OP_N, rows > 1 ? x.row_stride : columns};
  return {CUBLAS_OP_T, columns > 1 ? x.column_stride : rows};
}

// One handle per thread and device, as in torch. They are never destroyed, because at exit the driver may be gone
// first.
cublasStatus_t handle_on(int device, cublasHandle_t& handle) {
  thread_local std::unordered_map<int, cublasHandle_t> handles;
  const auto entry = handles.find(device);
  if (entry != handles.end()) {
    handle = entry->second;
    return CUBLAS_STATUS_SUCCESS;
  }
  const cublasStatus_t status = cublasCreate(&handle);
  if (status == CUBLAS_STATUS_SUCCESS) handles[device] = handle;
  return status;
}

}  // namespace

const char* bfloat16_gemm_launch(
    float* out, int64_t ld, Matrix<uint16_t> a, Matrix<uint16_t> b, int64_t m, int64_t n, int64_t k, bool accumulate,
    int device, CUstream_st* stream) {
  const Operand left = operand(b, k, n), right = operand(a, m, k);  // out^T = b^T a^T
  if (m == 1) ld = n;
  for (const int64_t size : {m, n, k, left.ld, right.ld, ld}) {
    if (size > INT_MAX) return "a dimension of more than 2^31 - 1";
  }

  cublasHandle_t handle = nullptr;
  cublasStatus_t status = handle_on(device, handle);
  if (status == CUBLAS_STATUS_SUCCESS) status = cublasSetStream(handle, stream);
  const float alpha = 1, beta = accumulate ? 1 : 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublasGemmEx(
        handle, left.op, right.op, int(n), int(m), int(k), &alpha, b.data, CUDA_R_16BF, int(left.ld), a.data,
        CUDA_R_16BF, int(right.ld), &beta, out, CUDA_R_32F, int(ld), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  }
  return status == CUBLAS_STATUS_SUCCESS ? nullptr : cublasGetStatusString(status);
}

}  // namespace brorl
