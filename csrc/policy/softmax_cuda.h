// Launchers of softmax.cu. They return nullptr, or CUDA's error text. Pointers are device memory of the shapes in
// softmax.h. Rows of logits begin at multiples of four elements, `stride` elements apart.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace brorl {

template <typename S>
const char* softmax_statistics_launch(
    const S* logits, int64_t stride, const int64_t* ids, double* statistics, int64_t rows, int64_t vocab, int64_t start,
    double temperature, CUstream_st* stream);

template <typename S>
const char* softmax_gradient_launch(
    S* logits, int64_t stride, const int64_t* ids, const double* statistics, const S* log_prob_gradient,
    const S* entropy_gradient, int64_t rows, int64_t vocab, int64_t start, double temperature, bool narrow,
    CUstream_st* stream);

}  // namespace brorl
