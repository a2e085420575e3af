// Transposes of matrices of 32-bit words, in registers, 16 x 16 at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace brorl {

constexpr int64_t kLine = 16;  // words of a cache line
typedef uint32_t Line __attribute__((vector_size(64)));
static_assert(sizeof(Line) == kLine * sizeof(uint32_t));

// Exchange lanes of a and b: a gets the lanes of both whose index lacks bit D, and b the lanes whose index has bit D.
// Lanes from a fill the indices without bit D, lanes from b those with it.
template <int D>
void exchange(Line& a, Line& b) {
  Line upper, lower;
#pragma GCC unroll 16
  for (int lane = 0; lane < kLine; ++lane) {
    lower[lane] = lane & D ? b[lane ^ D] : a[lane];
    upper[lane] = lane & D ? b[lane] : a[lane ^ D];
  }
  a = lower, b = upper;
}

// rows[i][j] <-> rows[j][i], by halves (Eklundh 1972).
inline void transpose(Line* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) exchange<8>(rows[i], rows[i + 8]);
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) exchange<4>(rows[i + (i & 4)], rows[i + (i & 4) + 4]);
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) exchange<2>(rows[2 * i - (i & 1)], rows[2 * i - (i & 1) + 2]);
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) exchange<1>(rows[2 * i], rows[2 * i + 1]);
}

// to[i * ld + p] = word i of line p. from(i, p): words i to i + 15 of line p; rest(i, p): word i, for the edges.
template <typename Word, typename From, typename Rest>
void turn(Word* to, int64_t ld, int64_t count, int64_t depth, From from, Rest rest) {
  for (int64_t p = 0; p < depth; p += kLine) {
    for (int64_t i = 0; i < count; i += kLine) {
      if (i + kLine <= count && p + kLine <= depth) {
        Line rows[kLine];
#pragma GCC unroll 16
        for (int64_t r = 0; r < kLine; ++r) rows[r] = from(i, p + r);
        transpose(rows);
#pragma GCC unroll 16
        for (int64_t r = 0; r < kLine; ++r) std::memcpy(to + (i + r) * ld + p, rows + r, sizeof(Line));
      } else {
        for (int64_t r = i; r < std::min(i + kLine, count); ++r) {
          for (int64_t q = p; q < std::min(p + kLine, depth); ++q) to[r * ld + q] = rest(r, q);
        }
      }
    }
  }
}

// to[c * ld + r] = x[r * stride + c] for r < rows, c < columns.
inline void transpose_floats(
    const float* x, int64_t stride, int64_t rows, int64_t columns, float* to, int64_t ld) {
  const auto row = [&](int64_t c, int64_t r) {
    Line line;
    std::memcpy(&line, x + r * stride + c, sizeof line);
    return line;
  };
  turn(to, ld, columns, rows, row, [&](int64_t c, int64_t r) { return x[r * stride + c]; });
}

}  // namespace brorl
