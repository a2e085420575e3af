// Blocks of the operands are packed to what oneDNN's micro-kernel wants and stay in cache while it runs over them:
// `a` with k contiguous, `b` with n contiguous, and bfloat16 in pairs of k, one pair to a word.
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

// The word of consecutive k, which are `stride` apart from x on.
inline float word(const float* x, int64_t) { return *x; }
inline uint32_t word(const uint16_t* x, int64_t stride) { return uint32_t(x[0]) | uint32_t(x[stride]) << 16; }

// words[i * ld + p] = the word at x + i + per p stride: a square that is turned in registers or the nearest cache, since
// writing along i at once would touch a cache line for every word.
template <typename T>
void transpose_words(
    typename Packing<T>::Word* words, int64_t ld, const T* x, int64_t stride, int64_t count, int64_t depth) {
  constexpr int64_t per = Packing<T>::kPerWord;
  typename Packing<T>::Word square[kLine][kLine];
  if (count == kLine && depth == kLine) {
    for (int64_t p = 0; p < kLine; ++p) {
      for (int64_t i = 0; i < kLine; ++i) square[p][i] = word(x + per * p * stride + i, stride);
    }
    for (int64_t i = 0; i < kLine; ++i) {
      for (int64_t p = 0; p < kLine; ++p) words[i * ld + p] = square[p][i];
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t p = 0; p < depth; ++p) words[i * ld + p] = word(x + per * p * stride + i, stride);
    }
  }
}

// words[i * ld_i + p * ld_p] = the word of x[i, kPerWord p ...] for i < count, where x [count, depth] has the given
// strides, one of them 1. The partner of an odd last element is 0.
template <typename T>
void pack_words(
    typename Packing<T>::Word* words, int64_t ld_i, int64_t ld_p, const T* x, int64_t stride_i, int64_t stride_k,
    int64_t count, int64_t depth) {
  using Word = typename Packing<T>::Word;
  constexpr int64_t per = Packing<T>::kPerWord;
  const int64_t whole = depth / per;
  if (stride_k == 1 && ld_p == 1) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(words + i * ld_i, x + i * stride_i, whole * sizeof(Word));
  } else if (stride_k == 1) {
    for (int64_t block = 0; block < whole; block += kLine) {  // a cache line of each row at a time
      const int64_t size = std::min(kLine, whole - block);
      for (int64_t i = 0; i < count; ++i) {
        Word line[kLine];
        std::memcpy(line, x + i * stride_i + per * block, size * sizeof(Word));
        for (int64_t p = 0; p < size; ++p) words[i * ld_i + (block + p) * ld_p] = line[p];
      }
    }
  } else if (ld_p == 1) {
    for (int64_t i = 0; i < count; i += kLine) {
      for (int64_t p = 0; p < whole; p += kLine) {
        transpose_words(
            words + i * ld_i + p, ld_i, x + i + per * p * stride_k, stride_k, std::min(kLine, count - i),
            std::min(kLine, whole - p));
      }
    }
  } else {
    for (int64_t p = 0; p < whole; ++p) {
      for (int64_t i = 0; i < count; ++i) words[i * ld_i + p * ld_p] = word(x + per * p * stride_k + i, stride_k);
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
template <typename T>
void blocked_gemm(float* out, int64_t ld, Matrix<T> a, Matrix<T> b, int64_t m, int64_t n, int64_t k, bool accumulate) {
  using Word = typename Packing<T>::Word;
  using Element = typename Packing<T>::Element;
  constexpr int64_t per = Packing<T>::kPerWord, words = Packing<T>::kWords, pitch = Packing<T>::kPitch;
  constexpr int64_t block = kTile * pitch;
  const int64_t row_tiles = (m + kTile - 1) / kTile, column_tiles = (n + kTile - 1) / kTile;
  // Per step in k the shorter side is packed once for all threads; the tiles of the longer one are shared out.
  const bool long_rows = m > n;
  std::vector<Word> shared((long_rows ? column_tiles : row_tiles) * block);
#pragma omp parallel num_threads(at::get_num_threads())
  {
    std::vector<Word> own(block);
    for (int64_t first = 0; first < k; first += per * words) {
      const int64_t depth = std::min(per * words, k - first);
      const auto pack = [&](bool rows, int64_t tile, Word* to) {
        const int64_t begin = tile * kTile;
        if (rows) {
          pack_words(to, pitch, 1, a.data + begin * a.row + first * a.column, a.row, a.column,
                     std::min(kTile, m - begin), depth);
        } else {
          pack_words(to, 1, kTile, b.data + first * b.row + begin * b.column, b.column, b.row,
                     std::min(kTile, n - begin), depth);
        }
      };
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < (long_rows ? column_tiles : row_tiles); ++tile) {
        pack(!long_rows, tile, shared.data() + tile * block);
      }
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < (long_rows ? row_tiles : column_tiles); ++tile) {
        pack(long_rows, tile, own.data());
        for (int64_t other = 0; other < (long_rows ? column_tiles : row_tiles); ++other) {
          const Word* const packed = shared.data() + other * block;
          const int64_t i = (long_rows ? tile : other) * kTile, j = (long_rows ? other : tile) * kTile;
          at::native::cpublas::brgemm(
              std::min(kTile, m - i), std::min(kTile, n - j), (depth + per - 1) / per * per, per * pitch, kTile, ld,
              accumulate || first > 0, reinterpret_cast<const Element*>(long_rows ? own.data() : packed),
              reinterpret_cast<const Element*>(long_rows ? packed : own.data()), out + i * ld + j, per == 2);
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
