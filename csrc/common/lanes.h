// Eight doubles at once, in the compiler's vector types: AVX-512 where there is, pairs or single numbers elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace brorl {

constexpr int64_t kLaneCount = 8;
typedef double Lanes __attribute__((vector_size(64)));
typedef int64_t LaneMask __attribute__((vector_size(64)));  // -1 where true, 0 where false: what comparisons give

inline Lanes all_lanes(double x) { return Lanes{} + x; }

// Lane i gets x[i + K], and from lane 8 - K on fill[0], fill[1], ...
template <int K, typename V>
V later_lanes(V x, V fill) {
  static_assert(K == 1 || K == 2 || K == 4);
#ifdef __clang__
  return __builtin_shufflevector(x, fill, K, K + 1, K + 2, K + 3, K + 4, K + 5, K + 6, K + 7);
#else
  return __builtin_shuffle(x, fill, LaneMask{K, K + 1, K + 2, K + 3, K + 4, K + 5, K + 6, K + 7});
#endif
}

// Eight values of type S at p, which needs no alignment.
template <typename S>
Lanes load_lanes(const S* p) {
  typedef S Narrow __attribute__((vector_size(kLaneCount * sizeof(S))));
  Narrow x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Lanes);
}

inline LaneMask load_mask(const bool* p) {
  typedef int8_t Narrow __attribute__((vector_size(kLaneCount)));
  Narrow x;
  std::memcpy(&x, p, sizeof x);
  return -__builtin_convertvector(x, LaneMask);
}

// Whether memory may be written by write_lanes<true>: past the caches, without reading what was there before.
inline bool streamable(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <bool Stream, typename S>
void write_lanes(S* p, Lanes values) {
  typedef S Narrow __attribute__((vector_size(kLaneCount * sizeof(S))));
  const Narrow x = __builtin_convertvector(values, Narrow);
#ifdef __SSE2__
  if constexpr (Stream) {
    __m128i piece[sizeof x / 16];
    std::memcpy(piece, &x, sizeof x);
    for (size_t i = 0; i < sizeof x / 16; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(p) + i, piece[i]);
    return;
  }
#endif
  std::memcpy(p, &x, sizeof x);
}

// To be called by each thread after write_lanes<true>, before others read.
inline void finish_streaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace brorl
