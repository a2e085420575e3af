// One thread per token. The work is negligible next to the logits.
#include "policy/ppo_tokens_cuda.h"

#include "common/launch.h"

namespace brorl {
namespace {

constexpr int kThreads = 256;

template <typename S>
__global__ void tokens_kernel(PpoTokenPointers<S> pointers, PpoSettings<S> settings, int64_t rows) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < rows) ppo_token_at(i, pointers, settings);
}

}  // namespace

template <typename S>
const char* ppo_tokens_launch(
    PpoTokenPointers<S> pointers, PpoSettings<S> settings, int64_t rows, CUstream_st* stream) {
  if (rows == 0) return nullptr;
  return launch_kernel(tokens_kernel<S>, (rows + kThreads - 1) / kThreads, kThreads, stream, pointers, settings, rows);
}

template const char* ppo_tokens_launch<float>(PpoTokenPointers<float>, PpoSettings<float>, int64_t, CUstream_st*);
template const char* ppo_tokens_launch<double>(PpoTokenPointers<double>, PpoSettings<double>, int64_t, CUstream_st*);

}  // namespace brorl
