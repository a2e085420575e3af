// What sample_tokens.cpp calls in sample_tokens.cu.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace brorl {

// logits: float, or bfloat16 where `bfloat16`, `vocab` per row and `stride` elements from row to row. The rest as in
// sample_tokens.h. Returns nullptr, or what CUDA says went wrong.
const char* sample_tokens_launch(
    const void* logits, bool bfloat16, int64_t rows, int64_t vocab, int64_t stride, const int64_t* keys,
    const int64_t* index, const int64_t* position, double temperature, double top_p, int64_t top_k, int64_t* ids,
    float* log_probs, CUstream_st* stream);

}  // namespace brorl
