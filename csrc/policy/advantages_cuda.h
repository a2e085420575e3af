// Launchers of advantages.cu. Pointers are device memory. A launcher returns nullptr, or CUDA's error text.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace brorl {

template <typename S>
const char* gae_launch(
    const S* rewards, const S* values, const int64_t* starts, int64_t segments, double gamma, double lambda,
    S* advantages, S* returns, CUstream_st* stream);

constexpr int kTokensPerBlock = 4096;  // in sums over all tokens

inline int64_t token_blocks(int64_t tokens) { return (tokens + kTokensPerBlock - 1) / kTokensPerBlock; }

// weights: null or [n]; elements of weight 0 are left out. table [1 + token_blocks(n), 3]: its first row gets count,
// mean and sum of squared deviations.
template <typename S>
const char* moments_launch(const S* values, const S* weights, int64_t n, double* table, CUstream_st* stream);

template <typename S>
const char* whiten_launch(S* values, int64_t n, double mean, double inverse_std, CUstream_st* stream);

}  // namespace brorl
