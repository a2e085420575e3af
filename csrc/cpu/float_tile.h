// A few rows of a float32 matrix product, summed in registers: the inner loop of float_gemm and segment_attention.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "common/float_lanes.h"

namespace brorl {

// As many sums as fit the registers: 6 x 4 with AVX-512, 6 x 1 with AVX2, 3 x 1 with smaller vectors.
constexpr int kTileWides = kHeld / 6 ? kHeld / 6 : 1, kTileRows = kHeld / kTileWides;
constexpr int64_t kTileColumns = kTileWides * kWide;

// The left operand: element (r, k) at data[r * row_stride + k * column_stride].
struct Rows {
  const float* data;
  int64_t row_stride, column_stride;

  Rows from(int64_t r, int64_t k) const {
    return {data + r * row_stride + k * column_stride, row_stride, column_stride};
  }
};

// out [R, 16 C] (row stride ld) = a [R, k] b [k, 16 C] (row stride ld_b), or out += a b with `accumulate`. ahead:
// distance from the elements of a in use to those to prefetch, if k is contiguous; 0: none.
template <int R, int C>
void multiply_tile(
    Rows a, const float* b, int64_t ld_b, int64_t k, float* out, int64_t ld, bool accumulate, int64_t ahead) {
  Wide sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = accumulate ? load_wide(out + r * ld + c * kWide) : Wide{};
  }
  for (int64_t begin = 0; begin < k; begin += kWide) {
    if (ahead) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) __builtin_prefetch(a.data + r * a.row_stride + begin + ahead);
    }
    for (int64_t i = begin; i < std::min(k, begin + kWide); ++i) {
      Wide x[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) x[c] = load_wide(b + i * ld_b + c * kWide);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float factor = a.data[r * a.row_stride + i * a.column_stride];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] += factor * x[c];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store_wide(out + r * ld + c * kWide, sum[r][c]);
  }
}

using MultiplyTile = void (*)(Rows, const float*, int64_t, int64_t, float*, int64_t, bool, int64_t);

template <size_t... I>
constexpr std::array<MultiplyTile, sizeof...(I)> multiply_tiles(std::index_sequence<I...>) {
  return {multiply_tile<I / kTileWides + 1, I % kTileWides + 1>...};
}

// Multiply up to kTileRows rows by up to kTileWides vectors of kWide columns. wides: the number of these vectors.
inline void multiply(
    Rows a, int64_t rows, const float* b, int64_t ld_b, int64_t wides, int64_t k, float* out, int64_t ld,
    bool accumulate, int64_t ahead = 0) {
  static constexpr auto tiles = multiply_tiles(std::make_index_sequence<kTileRows * kTileWides>());
  tiles[(rows - 1) * kTileWides + wides - 1](a, b, ld_b, k, out, ld, accumulate, ahead);
}

}  // namespace brorl
