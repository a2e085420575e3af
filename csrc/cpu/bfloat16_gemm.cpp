// oneDNN's micro-kernel runs over blocks of the operands that fit the cache. Blocks are packed if they do not have its
// layout: `a` with k contiguous; `b` with n contiguous and two consecutive k per word.
#include "cpu/bfloat16_gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/Exception.h>

#include "common/transpose.h"

// torch reports whether it has the kernel.
#if defined(CPUBLAS_BRGEMM_BF16BF16F32) && defined(__x86_64__)
#define BRORL_HAS_KERNEL 1
#endif

namespace brorl {

bool has_bfloat16_kernel() {
#ifdef BRORL_HAS_KERNEL
  static const bool is_supported = __builtin_cpu_supports("avx512bf16");
  return is_supported;
#else
  return false;
#endif
}

#ifdef BRORL_HAS_KERNEL
namespace {

constexpr int64_t kTile = 64;              // rows or columns of a block
constexpr int64_t kWords = 256;            // pairs of k per block: a packed block is 64 KiB
constexpr int64_t kPitch = kWords + kLine;

// word: the pair x[0] and x[stride] of consecutive k. line: 16 such words, for consecutive outer indices.
inline uint32_t word(const uint16_t* x, int64_t stride) { return uint32_t(x[0]) | uint32_t(x[stride]) << 16; }

inline Line line(const uint16_t* x, int64_t stride) {
  typedef uint16_t Half __attribute__((vector_size(32)));
  Half first, second;
  std::memcpy(&first, x, sizeof first);
  std::memcpy(&second, x + stride, sizeof second);
  return __builtin_convertvector(first, Line) | __builtin_convertvector(second, Line) << 16;
}

// words[i * ld_i + p * ld_p] = the pair at x[i, 2 p] for i < count. x [count, depth] and words each have one stride of
// 1. If depth is odd, the last element is paired with 0.
void pack_words(
    uint32_t* words, int64_t ld_i, int64_t ld_p, const uint16_t* x, int64_t stride_i, int64_t stride_k, int64_t count,
    int64_t depth) {
  const int64_t full_pairs = depth / 2;
  const auto pair_at = [&](int64_t i, int64_t p) {
    uint32_t pair;
    std::memcpy(&pair, x + i * stride_i + 2 * p, sizeof pair);
    return pair;
  };
  if (stride_k == 1 && ld_p == 1) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(words + i * ld_i, x + i * stride_i, full_pairs * sizeof(uint32_t));
  } else if (stride_k == 1) {
    const auto row = [&](int64_t p, int64_t i) {
      Line pairs;
      std::memcpy(&pairs, x + i * stride_i + 2 * p, sizeof pairs);
      return pairs;
    };
    turn(words, ld_p, full_pairs, count, row, [&](int64_t p, int64_t i) { return pair_at(i, p); });
  } else if (ld_p == 1) {
    turn(
        words, ld_i, count, full_pairs,
        [&](int64_t i, int64_t p) {
          // Rows of x may be a page apart, which the hardware does not prefetch.
          __builtin_prefetch(x + 2 * (p + 2 * kLine) * stride_k + i);
          return line(x + 2 * p * stride_k + i, stride_k);
        },
        [&](int64_t i, int64_t p) { return word(x + 2 * p * stride_k + i, stride_k); });
  } else {
    for (int64_t p = 0; p < full_pairs; ++p) {
      for (int64_t i = 0; i < count; ++i) words[i + p * ld_p] = word(x + 2 * p * stride_k + i, stride_k);
    }
  }
  if (depth % 2) {
    for (int64_t i = 0; i < count; ++i) words[i * ld_i + full_pairs * ld_p] = x[i * stride_i + (depth - 1) * stride_k];
  }
}

// One operand in the kernel's layout: tiles along its outer dimension, each with a block of k.
struct Operand {
  Operand(Matrix<uint16_t> matrix, bool is_a, int64_t size, int64_t k)
      : x(matrix), is_a(is_a), outer_stride(is_a ? x.row_stride : x.column_stride),
        k_stride(is_a ? x.column_stride : x.row_stride), size(size) {
    // Rows of a with k contiguous are read in place if they do not overlap; the stride of a single row does not matter.
    direct = is_a && k_stride == 1 && k % 2 == 0 && (size == 1 || outer_stride >= k);
    ld = direct ? std::max(outer_stride, k) : is_a ? 2 * kPitch : kTile;
  }

  int64_t tiles() const { return (size + kTile - 1) / kTile; }
  int64_t width(int64_t tile) const { return std::min(kTile, size - tile * kTile); }

  // Return the tile's block of `depth` elements of k from `first` on, packed to memory if needed.
  const uint16_t* block(int64_t tile, int64_t first, int64_t depth, uint32_t* memory) const {
    const uint16_t* const from = x.data + tile * kTile * outer_stride + first * k_stride;
    if (direct) return from;
    pack_words(memory, is_a ? kPitch : 1, is_a ? 1 : kTile, from, outer_stride, k_stride, width(tile), depth);
    return reinterpret_cast<const uint16_t*>(memory);
  }

  Matrix<uint16_t> x;
  bool is_a;
  int64_t outer_stride, k_stride, size, ld;
  bool direct;
};

}  // namespace

void bfloat16_gemm(
    float* out, int64_t ld, Matrix<uint16_t> a, Matrix<uint16_t> b, int64_t m, int64_t n, int64_t k, bool accumulate) {
  constexpr int64_t block_words = kTile * kPitch;
  const Operand rows(a, /*is_a=*/true, m, k), columns(b, /*is_a=*/false, n, k);
  // For every block of k the shorter side is packed once for all threads, which share the tiles of the longer one.
  const bool long_rows = m > n;
  const Operand &longer = long_rows ? rows : columns, &shorter = long_rows ? columns : rows;
  std::vector<uint32_t> packed(shorter.direct ? 0 : shorter.tiles() * block_words);
  std::vector<const uint16_t*> shared(shorter.tiles());
#pragma omp parallel num_threads(at::get_num_threads())
  {
    std::vector<uint32_t> block_memory(longer.direct ? 0 : block_words);
    for (int64_t first = 0; first < k; first += 2 * kWords) {
      const int64_t depth = std::min(2 * kWords, k - first);
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < shorter.tiles(); ++tile) {
        shared[tile] = shorter.block(tile, first, depth, packed.data() + tile * block_words);
      }
#pragma omp for schedule(dynamic)
      for (int64_t tile = 0; tile < longer.tiles(); ++tile) {
        const uint16_t* const mine = longer.block(tile, first, depth, block_memory.data());
        for (int64_t other = 0; other < shorter.tiles(); ++other) {
          const int64_t i = long_rows ? tile : other, j = long_rows ? other : tile;
          at::native::cpublas::brgemm(
              rows.width(i), columns.width(j), (depth + 1) / 2 * 2, rows.ld, columns.ld, ld, accumulate || first > 0,
              reinterpret_cast<const at::BFloat16*>(long_rows ? mine : shared[other]),
              reinterpret_cast<const at::BFloat16*>(long_rows ? shared[other] : mine), out + i * kTile * ld + j * kTile);
        }
      }
    }
    at::native::cpublas::brgemm_release();
  }
}

#else
void bfloat16_gemm(float*, int64_t, Matrix<uint16_t>, Matrix<uint16_t>, int64_t, int64_t, int64_t, bool) {
  TORCH_INTERNAL_ASSERT(false, "bfloat16_gemm: this torch has no kernel for it");
}
#endif

}  // namespace brorl
