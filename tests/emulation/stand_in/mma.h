// Stands in for CUDA's header: matrices that a warp holds together, eight numbers a lane, and their products. Their
// layout is not CUDA's, so that what counts on that comes out wrong.
#pragma once

#include "cuda_bf16.h"

namespace nvcuda {
namespace wmma {

struct row_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major };

constexpr int kOwn = 8;  // of 16 x 16: half a row

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static_assert(M == 16 && N == 16 && K == 16);
  T own[kOwn];
};

// All lanes come to each of these, and what they share begins at a multiple of 32 bytes, as do its rows of 16.
template <typename T>
T* of_lane(T* matrix, unsigned row_size, emulation::Place place) {
  emulation::meet_warp(0xffffffffu, 0, place);
  if (reinterpret_cast<uintptr_t>(matrix) % 32) emulation::fail("a matrix does not begin at 32 bytes", place);
  if (row_size * sizeof(T) % 16) emulation::fail("a matrix has rows of no multiple of 16 bytes", place);
  return matrix + emulation::lane() / 2 * row_size + emulation::lane() % 2 * kOwn;
}

template <typename Use, typename Layout, typename T>
void load_matrix_sync(
    fragment<Use, 16, 16, 16, T, Layout>& to, const T* from, unsigned row_size,
    emulation::Place place = emulation::Place::here()) {
  const T* const own = of_lane(from, row_size, place);
  for (int i = 0; i < kOwn; ++i) to.own[i] = own[i];
}

using Sums = fragment<accumulator, 16, 16, 16, float>;

inline void load_matrix_sync(
    Sums& to, const float* from, unsigned row_size, layout_t, emulation::Place place = emulation::Place::here()) {
  const float* const own = of_lane(from, row_size, place);
  for (int i = 0; i < kOwn; ++i) to.own[i] = own[i];
}

inline void store_matrix_sync(
    float* to, const Sums& from, unsigned row_size, layout_t, emulation::Place place = emulation::Place::here()) {
  float* const own = of_lane(to, row_size, place);
  for (int i = 0; i < kOwn; ++i) own[i] = from.own[i];
}

inline void fill_fragment(Sums& to, float x) {
  for (float& own : to.own) own = x;
}

// The whole matrix [16][16], from all lanes.
template <typename Fragment>
void gather(const Fragment& from, float (&whole)[16][16], emulation::Place place) {
  for (int half = 0; half < 2; ++half) {
    uint64_t four = 0;
    std::memcpy(&four, from.own + 4 * half, sizeof four);
    const uint64_t* const of_lanes = emulation::meet_warp(0xffffffffu, four, place);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const unsigned bits = unsigned(of_lanes[lane] >> (16 * i) & 0xffff) << 16;
        whole[lane / 2][lane % 2 * kOwn + 4 * half + i] = __uint_as_float(bits);
      }
    }
  }
}

// Products of bfloat16 are exact in float32, in which they are added up.
inline void mma_sync(
    Sums& to, const fragment<matrix_a, 16, 16, 16, __nv_bfloat16, row_major>& a,
    const fragment<matrix_b, 16, 16, 16, __nv_bfloat16, row_major>& b, const Sums& c,
    emulation::Place place = emulation::Place::here()) {
  float rows[16][16], columns[16][16];
  gather(a, rows, place);
  gather(b, columns, place);
  const unsigned row = emulation::lane() / 2, first = emulation::lane() % 2 * kOwn;
  for (int i = 0; i < kOwn; ++i) {
    float sum = c.own[i];
    for (int k = 0; k < 16; ++k) sum += rows[row][k] * columns[k][first + i];
    to.own[i] = sum;
  }
}

}  // namespace wmma
}  // namespace nvcuda
