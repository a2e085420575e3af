// A fake of cuBLAS for CPUs: the functions that csrc/common/gemm.cu calls, with the names, values and errors of
// cublas_api.h (CUDA 13). As in the reference BLAS, matrices are column-major, op(A) [m, k], op(B) [k, n] and C = alpha
// op(A) op(B) + beta C. C is not read if beta is 0.
#pragma once

#include <cstdint>
#include <cstring>

typedef struct CUstream_st* cudaStream_t;
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16BF = 14 };
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };
struct cublasContext {
  cudaStream_t stream;
};
typedef cublasContext* cublasHandle_t;

inline int cublas_handles = 0;
inline cudaStream_t cublas_stream = nullptr;  // of the last product

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  *handle = new cublasContext{nullptr};
  ++cublas_handles;
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

inline const char* cublasGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS_NOT_SUPPORTED";
}

inline float cublas_widened(const void* data, int64_t i) {
  const uint32_t bits = uint32_t(static_cast<const uint16_t*>(data)[i]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline cublasStatus_t cublasGemmEx(
    cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k, const void* alpha,
    const void* A, cudaDataType Atype, int lda, const void* B, cudaDataType Btype, int ldb, const void* beta, void* C,
    cudaDataType Ctype, int ldc, cublasComputeType_t computeType, cublasGemmAlgo_t) {
  if (Atype != CUDA_R_16BF || Btype != CUDA_R_16BF || Ctype != CUDA_R_32F || computeType != CUBLAS_COMPUTE_32F) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const bool turn_a = transa == CUBLAS_OP_T, turn_b = transb == CUBLAS_OP_T;
  if (m < 0 || n < 0 || k < 0 || lda < (turn_a ? k : m) || ldb < (turn_b ? n : k) || ldc < m) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  cublas_stream = handle->stream;
  auto* const out = static_cast<float*>(C);
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < m; ++i) {
      double sum = 0;
      for (int p = 0; p < k; ++p) {
        const int64_t a = turn_a ? p + int64_t(i) * lda : i + int64_t(p) * lda;
        const int64_t b = turn_b ? j + int64_t(p) * ldb : p + int64_t(j) * ldb;
        sum += double(cublas_widened(A, a)) * cublas_widened(B, b);
      }
      float& c = out[i + int64_t(j) * ldc];
      const float before = *static_cast<const float*>(beta) == 0 ? 0 : *static_cast<const float*>(beta) * c;
      c = float(*static_cast<const float*>(alpha) * sum) + before;
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
