// The product is computed group of columns by group of columns, and block of k by block of k. Each block of b is packed
// once for all threads into panels as wide as a tile. Then threads share blocks of rows times runs of panels. A block of
// a fits the cache; it is packed if its columns are contiguous (Goto & van de Geijn 2008).
#include "cpu/float_gemm.h"

#include <algorithm>
#include <cstring>

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include "cpu/float_tile.h"
#include "common/transpose.h"

namespace brorl {
namespace {

constexpr int64_t kDepth = 768;           // largest k per block; results are read and written once per block
constexpr int64_t kBlock = 48 * 1024;      // elements of a per piece of work, approximately (192 KiB)
constexpr int64_t kPacked = 1024 * 1024;  // elements of b packed at a time, at most (4 MiB)
constexpr int64_t kPieces = 16;           // pieces per thread, at least
constexpr int64_t kRowsAhead = 16;        // rows prefetched while rows are copied

int64_t ceil_div(int64_t size, int64_t divisor) { return (size + divisor - 1) / divisor; }

// Uninitialised memory, aligned to cache lines.
struct Floats {
  explicit Floats(int64_t count) : memory(c10::GetCPUAllocator()->allocate(count * sizeof(float))) {}
  float* data() { return static_cast<float*>(memory.get()); }
  c10::DataPtr memory;
};

// Prefetch explicitly, because rows may be a page apart, which the hardware does not prefetch.
void copy_row(const float* from, int64_t stride, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + kRowsAhead * stride + i);
  std::memcpy(to, from, count * sizeof(float));
}

// Pack `columns` of b's block [depth, ...] row by row, kTileColumns elements per row; zeros pad to a multiple of kWide.
void pack_panel(Matrix<float> b, int64_t depth, int64_t columns, float* to) {
  if (b.column_stride == 1) {
    const int64_t stride = b.row_stride;
    for (int64_t i = 0; i < depth; ++i) copy_row(b.data + i * stride, stride, columns, to + i * kTileColumns);
  } else {
    transpose_floats(b.data, b.column_stride, columns, depth, to, kTileColumns);
  }
  if (const int64_t used = ceil_div(columns, kWide) * kWide; used > columns) {
    for (int64_t i = 0; i < depth; ++i) std::fill(to + i * kTileColumns + columns, to + i * kTileColumns + used, 0.0f);
  }
}

// Return rows of a, packed to [depth, rows] if k is not contiguous.
Rows pack_rows(Matrix<float> a, int64_t rows, int64_t depth, float* to) {
  if (a.column_stride == 1) return {a.data, a.row_stride, 1};
  for (int64_t i = 0; i < depth; ++i) copy_row(a.data + i * a.column_stride, a.column_stride, rows, to + i * rows);
  return {to, 1, rows};
}

// Multiply rows by one panel. fresh: the rows are not in cache yet.
void multiply_panel(
    Rows a, int64_t rows, const float* panel, int64_t columns, int64_t depth, float* out, int64_t ld, bool accumulate,
    bool fresh) {
  const int64_t ahead = fresh && a.column_stride == 1 ? kTileRows * a.row_stride : 0;
  const int64_t wides = ceil_div(columns, kWide);
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, rows - r);
    float* const to = out + r * ld;
    if (columns % kWide == 0) {
      multiply(a.from(r, 0), count, panel, kTileColumns, wides, depth, to, ld, accumulate, ahead);
      continue;
    }
    float tile[kTileRows * kTileColumns] = {};  // out has no room for the padding to a multiple of kWide
    for (int64_t i = 0; accumulate && i < count; ++i) std::copy_n(to + i * ld, columns, tile + i * kTileColumns);
    multiply(a.from(r, 0), count, panel, kTileColumns, wides, depth, tile, kTileColumns, accumulate, ahead);
    for (int64_t i = 0; i < count; ++i) std::copy_n(tile + i * kTileColumns, columns, to + i * ld);
  }
}

}  // namespace

bool prefers_float_gemm() {
#if defined(__AVX512F__) && defined(__x86_64__)
  static const bool amd = __builtin_cpu_is("amd");
  return amd;
#else
  return false;
#endif
}

void float_gemm(
    float* out, int64_t ld, Matrix<float> a, Matrix<float> b, int64_t m, int64_t n, int64_t k, bool accumulate) {
  const int threads = at::get_num_threads();
  const int64_t depth = ceil_div(k, ceil_div(k, kDepth)), panels = ceil_div(n, kTileColumns);
  const int64_t rows = std::max<int64_t>(1, kBlock / depth / kTileRows) * kTileRows, blocks = ceil_div(m, rows);
  const int64_t panel = kTileColumns * depth, group = std::min(panels, std::max<int64_t>(1, kPacked / panel));
  // Panels per piece of work: so few that no thread waits long for the last piece of another thread.
  const int64_t run = ceil_div(group, std::min(group, ceil_div(kPieces * threads, blocks)));
  Floats packed(group * panel);
#pragma omp parallel num_threads(threads)
  {
    Floats row_memory(a.column_stride == 1 ? 0 : rows * depth);
    for (int64_t left = 0; left < panels; left += group) {
      const int64_t right = std::min(panels, left + group), runs = ceil_div(right - left, run);
      for (int64_t first = 0; first < k; first += depth) {
        const int64_t size = std::min(depth, k - first);
#pragma omp for schedule(static)
        for (int64_t p = left; p < right; ++p) {
          const float* const from = b.data + first * b.row_stride + p * kTileColumns * b.column_stride;
          pack_panel(
              {from, b.row_stride, b.column_stride}, size, std::min(kTileColumns, n - p * kTileColumns),
              packed.data() + (p - left) * panel);
        }
#pragma omp for schedule(dynamic)
        for (int64_t work = 0; work < blocks * runs; ++work) {
          const int64_t r = work / runs * rows, count = std::min(rows, m - r), begin = left + work % runs * run;
          const float* const from = a.data + r * a.row_stride + first * a.column_stride;
          const Rows block_rows = pack_rows({from, a.row_stride, a.column_stride}, count, size, row_memory.data());
          for (int64_t p = begin; p < std::min(right, begin + run); ++p) {
            const int64_t column = p * kTileColumns;
            multiply_panel(
                block_rows, count, packed.data() + (p - left) * panel, std::min(kTileColumns, n - column), size,
                out + r * ld + column, ld, accumulate || first > 0, /*fresh=*/p == begin);
          }
        }
      }
    }
  }
}

}  // namespace brorl
