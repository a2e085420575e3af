// Blocks of the operands are packed to what oneDNN's micro-kernel wants and stay in cache while it runs over them:
// rows of `a` with k contiguous, and pairs of k interleaved in `b`.
#include "bfloat16_gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

namespace brorl {
namespace {

// Of one call of the micro-kernel. Its operands, 2 * kDepth * kTile * 2 bytes, lie in the second cache level.
constexpr int64_t kTile = 64, kDepth = 512;
constexpr int64_t kPairs = kDepth / 2, kLine = 16;

// words[i * ld_i + p * ld_p] = the pair (x[i, 2p], x[i, 2p + 1]) for i < count, where x [count, depth] has the given
// strides, one of them 1. The partner of an odd last element is 0.
void pair_up(
    uint32_t* words, int64_t ld_i, int64_t ld_p, const uint16_t* x, int64_t stride_i, int64_t stride_k, int64_t count,
    int64_t depth) {
  const int64_t pairs = depth / 2;
  if (stride_k == 1 && ld_p == 1) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(words + i * ld_i, x + i * stride_i, pairs * sizeof(uint32_t));
  } else if (stride_k == 1) {
    for (int64_t block = 0; block < pairs; block += kLine) {  // a cache line of each row at a time
      const int64_t size = std::min(kLine, pairs - block);
      for (int64_t i = 0; i < count; ++i) {
        uint32_t line[kLine];
        std::memcpy(line, x + i * stride_i + 2 * block, size * sizeof(uint32_t));
        for (int64_t p = 0; p < size; ++p) words[i * ld_i + (block + p) * ld_p] = line[p];
      }
    }
  } else {
    for (int64_t p = 0; p < pairs; ++p) {
      const uint16_t* const even = x + 2 * p * stride_k;
      const uint16_t* const odd = even + stride_k;
      for (int64_t i = 0; i < count; ++i) words[i * ld_i + p * ld_p] = uint32_t(even[i]) | uint32_t(odd[i]) << 16;
    }
  }
  if (depth % 2) {
    for (int64_t i = 0; i < count; ++i) words[i * ld_i + pairs * ld_p] = x[i * stride_i + (depth - 1) * stride_k];
  }
}

}  // namespace

bool has_bfloat16_kernel() {
#if defined(CPUBLAS_BRGEMM_BF16BF16F32) && defined(__x86_64__)
  static const bool found = __builtin_cpu_supports("avx512bf16");
  return found;
#else
  return false;
#endif
}

void bfloat16_gemm(
    float* out, int64_t ld, BFloat16Matrix a, BFloat16Matrix b, int64_t m, int64_t n, int64_t k, bool accumulate) {
  const int64_t row_tiles = (m + kTile - 1) / kTile, column_tiles = (n + kTile - 1) / kTile;
  // Per step in k the shorter side is packed once for all threads; the tiles of the longer one are shared out.
  const bool long_rows = m > n;
  std::vector<uint32_t> shared((long_rows ? column_tiles : row_tiles) * kTile * kPairs);
#pragma omp parallel num_threads(at::get_num_threads())
  {
    std::vector<uint32_t> own(kTile * kPairs);
    for (int64_t first = 0; first < k; first += kDepth) {
      const int64_t depth = std::min(kDepth, k - first);
      const auto pack = [&](bool rows, int64_t tile, uint32_t* words) {
        const int64_t begin = tile * kTile;
        if (rows) {
          pair_up(words, kPairs, 1, a.data + begin * a.row + first * a.column, a.row, a.column,
                  std::min(kTile, m - begin), depth);
        } else {
          pair_up(words, 1, kTile, b.data + first * b.row + begin * b.column, b.column, b.row,
                  std::min(kTile, n - begin), depth);
        }
      };
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < (long_rows ? column_tiles : row_tiles); ++tile) {
        pack(!long_rows, tile, shared.data() + tile * kTile * kPairs);
      }
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < (long_rows ? row_tiles : column_tiles); ++tile) {
        pack(long_rows, tile, own.data());
        for (int64_t other = 0; other < (long_rows ? column_tiles : row_tiles); ++other) {
          const uint32_t* const packed = shared.data() + other * kTile * kPairs;
          const int64_t i = (long_rows ? tile : other) * kTile, j = (long_rows ? other : tile) * kTile;
          at::native::cpublas::brgemm(
              std::min(kTile, m - i), std::min(kTile, n - j), depth + depth % 2, kDepth, kTile, ld,
              accumulate || first > 0, reinterpret_cast<const at::BFloat16*>(long_rows ? own.data() : packed),
              reinterpret_cast<const at::BFloat16*>(long_rows ? packed : own.data()), out + i * ld + j);
        }
      }
    }
    at::native::cpublas::brgemm_release();
  }
}

}  // namespace brorl
