// oneDNN's micro-kernel runs over blocks of the operands that stay in cache, and are packed where they do not lie as it
// wants: `a` with k contiguous, `b` with n contiguous, and bfloat16 in pairs of k, one pair to a word.
#include "blocked_gemm.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/Exception.h>

// Torch says which of these kernels it has; without both, neither is used.
#if defined(CPUBLAS_BRGEMM_BF16BF16F32) && defined(CPUBLAS_BRGEMM_F32F32F32) && defined(__x86_64__)
#define BRORL_HAS_KERNELS 1
#endif

namespace brorl {
namespace {

constexpr int64_t kTile = 64, kLine = 16;  // rows or columns of a block; words of a cache line

template <typename T>
struct Packing;

template <>
struct Packing<uint16_t> {
  using Word = uint32_t;
  using Element = at::BFloat16;
  static constexpr int64_t kPerWord = 2, kWords = 256;  // k per block, in words: a packed block is 64 KiB
  static constexpr int64_t kPitch = kWords + kLine;
};

template <>
struct Packing<float> {
  using Word = float;
  using Element = float;
  static constexpr int64_t kPerWord = 1, kWords = 896;  // fewer lose speed: results are read and written once per block
  static constexpr int64_t kPitch = kWords + kLine;
};

typedef uint32_t Line __attribute__((vector_size(64)));
static_assert(sizeof(Line) == kLine * sizeof(uint32_t));

// Lanes whose number has no bit D come from a, from the same place or D further on; the others likewise from b.
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
void transpose(Line* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) exchange<8>(rows[i], rows[i + 8]);
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) exchange<4>(rows[i + (i & 4)], rows[i + (i & 4) + 4]);
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) exchange<2>(rows[2 * i - (i & 1)], rows[2 * i - (i & 1) + 2]);
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) exchange<1>(rows[2 * i], rows[2 * i + 1]);
}

// The words of k, k + 1, ... whose elements lie `stride` apart from x on: one, or 16 for consecutive outer indices.
inline float word(const float* x, int64_t) { return *x; }
inline uint32_t word(const uint16_t* x, int64_t stride) { return uint32_t(x[0]) | uint32_t(x[stride]) << 16; }

inline Line line(const float* x, int64_t) {
  Line words;
  std::memcpy(&words, x, sizeof words);
  return words;
}

inline Line line(const uint16_t* x, int64_t stride) {
  typedef uint16_t Half __attribute__((vector_size(32)));
  Half first, second;
  std::memcpy(&first, x, sizeof first);
  std::memcpy(&second, x + stride, sizeof second);
  return __builtin_convertvector(first, Line) | __builtin_convertvector(second, Line) << 16;
}

// to[i * ld + p] = from(p)'s word i for a square of 16; rest(i, p) fills what does not make one.
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

// words[i * ld_i + p * ld_p] = the word of x[i, kPerWord p ...] for i < count, where x [count, depth] has the given
// strides, one of them 1, as has words. The partner of an odd last element is 0.
template <typename T>
void pack_words(
    typename Packing<T>::Word* words, int64_t ld_i, int64_t ld_p, const T* x, int64_t stride_i, int64_t stride_k,
    int64_t count, int64_t depth) {
  using Word = typename Packing<T>::Word;
  constexpr int64_t per = Packing<T>::kPerWord;
  const int64_t whole = depth / per;
  const auto at = [&](int64_t i, int64_t p) {
    Word found;
    std::memcpy(&found, x + i * stride_i + per * p, sizeof found);
    return found;
  };
  if (stride_k == 1 && ld_p == 1) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(words + i * ld_i, x + i * stride_i, whole * sizeof(Word));
  } else if (stride_k == 1) {
    const auto row = [&](int64_t p, int64_t i) {
      Line found;
      std::memcpy(&found, x + i * stride_i + per * p, sizeof found);
      return found;
    };
    turn(words, ld_p, whole, count, row, [&](int64_t p, int64_t i) { return at(i, p); });
  } else if (ld_p == 1) {
    turn(
        words, ld_i, count, whole,
        [&](int64_t i, int64_t p) {
          // Rows of x may be a page apart, which the hardware does not fetch ahead by itself.
          __builtin_prefetch(x + per * (p + 2 * kLine) * stride_k + i);
          return line(x + per * p * stride_k + i, stride_k);
        },
        [&](int64_t i, int64_t p) { return word(x + per * p * stride_k + i, stride_k); });
  } else {
    for (int64_t p = 0; p < whole; ++p) {
      for (int64_t i = 0; i < count; ++i) words[i + p * ld_p] = word(x + per * p * stride_k + i, stride_k);
    }
  }
  if (depth % per) {
    for (int64_t i = 0; i < count; ++i) words[i * ld_i + whole * ld_p] = x[i * stride_i + (depth - 1) * stride_k];
  }
}

}  // namespace

bool has_bfloat16_kernel() {
#ifdef BRORL_HAS_KERNELS
  static const bool found = __builtin_cpu_supports("avx512bf16");
  return found;
#else
  return false;
#endif
}

bool prefers_float_kernel() {
#ifdef BRORL_HAS_KERNELS
  static const bool found = __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
  return found;
#else
  return false;
#endif
}

#ifdef BRORL_HAS_KERNELS
namespace {

// One operand as the kernel reads it: tiles along its outer dimension, each with a block of k.
template <typename T>
struct Operand {
  using Word = typename Packing<T>::Word;
  static constexpr int64_t kPer = Packing<T>::kPerWord, kWords = Packing<T>::kWords;

  Operand(Matrix<T> matrix, bool is_a, int64_t size, int64_t k)
      : x(matrix), a(is_a), outer(is_a ? x.row : x.column), along_k(is_a ? x.column : x.row), size(size) {
    // What lies as the kernel wants it stays where it is: rows of a with k contiguous, rows of a float b. They must not
    // overlap, and the only row of a matrix may have any stride.
    const int64_t row = a ? k : size, rows = a ? size : k, stride = a ? outer : along_k;
    direct = (a ? along_k == 1 && k % kPer == 0 : outer == 1 && kPer == 1) && (rows == 1 || stride >= row);
    ld = direct ? std::max(stride, row) : a ? kPer * Packing<T>::kPitch : kTile;
  }

  int64_t tiles() const { return (size + kTile - 1) / kTile; }
  int64_t width(int64_t tile) const { return std::min(kTile, size - tile * kTile); }

  // The tile's block of `depth` elements of k from `first` on, packed to memory where that is needed.
  const T* block(int64_t tile, int64_t first, int64_t depth, Word* memory) const {
    const T* const from = x.data + tile * kTile * outer + first * along_k;
    if (direct) return from;
    pack_words(memory, a ? Packing<T>::kPitch : 1, a ? 1 : kTile, from, outer, along_k, width(tile), depth);
    return reinterpret_cast<const T*>(memory);
  }

  Matrix<T> x;
  bool a;
  int64_t outer, along_k, size, ld;
  bool direct;
};

}  // namespace

template <typename T>
void blocked_gemm(float* out, int64_t ld, Matrix<T> a, Matrix<T> b, int64_t m, int64_t n, int64_t k, bool accumulate) {
  using Word = typename Packing<T>::Word;
  using Element = typename Packing<T>::Element;
  constexpr int64_t per = Packing<T>::kPerWord, words = Packing<T>::kWords, block = kTile * Packing<T>::kPitch;
  const Operand<T> rows(a, true, m, k), columns(b, false, n, k);
  // Per step in k the shorter side is packed once for all threads; the tiles of the longer one are shared out.
  const bool long_rows = m > n;
  const Operand<T>&longer = long_rows ? rows : columns, &shorter = long_rows ? columns : rows;
  std::vector<Word> packed(shorter.direct ? 0 : shorter.tiles() * block);
  std::vector<const T*> shared(shorter.tiles());
#pragma omp parallel num_threads(at::get_num_threads())
  {
    std::vector<Word> own(longer.direct ? 0 : block);
    for (int64_t first = 0; first < k; first += per * words) {
      const int64_t depth = std::min(per * words, k - first);
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < shorter.tiles(); ++tile) {
        shared[tile] = shorter.block(tile, first, depth, packed.data() + tile * block);
      }
#pragma omp for schedule(dynamic)
      for (int64_t tile = 0; tile < longer.tiles(); ++tile) {
        const T* const mine = longer.block(tile, first, depth, own.data());
        for (int64_t other = 0; other < shorter.tiles(); ++other) {
          const int64_t i = long_rows ? tile : other, j = long_rows ? other : tile;
          at::native::cpublas::brgemm(
              rows.width(i), columns.width(j), (depth + per - 1) / per * per, rows.ld, columns.ld, ld,
              accumulate || first > 0, reinterpret_cast<const Element*>(long_rows ? mine : shared[other]),
              reinterpret_cast<const Element*>(long_rows ? shared[other] : mine), out + i * kTile * ld + j * kTile,
              per == 2);
        }
      }
    }
    at::native::cpublas::brgemm_release(per == 2);
  }
}

#else
template <typename T>
void blocked_gemm(float*, int64_t, Matrix<T>, Matrix<T>, int64_t, int64_t, int64_t, bool) {
  TORCH_INTERNAL_ASSERT(false, "blocked_gemm: this torch has no kernel for it");
}
#endif

template void blocked_gemm(float*, int64_t, Matrix<uint16_t>, Matrix<uint16_t>, int64_t, int64_t, int64_t, bool);
template void blocked_gemm(float*, int64_t, Matrix<float>, Matrix<float>, int64_t, int64_t, int64_t, bool);

}  // namespace brorl
