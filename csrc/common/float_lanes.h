// Sixteen floats, read from float32 or bfloat16, in vectors of the processor's size. The compiler would keep wider
// vectors in memory and move them lane by lane.
#pragma once

#include <cstdint>
#include <cstring>

#include <c10/util/BFloat16.h>

namespace brorl {

// Lanes of a vector, and number of vectors.
#if defined(__AVX512F__)
constexpr int kPartLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kPartLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kPartLanes = 4, kRegisters = 32;
#else
constexpr int kPartLanes = 4, kRegisters = 16;
#endif

constexpr int64_t kWide = 16;  // floats in a Wide
constexpr int kParts = kWide / kPartLanes;
constexpr int kHeld = kRegisters * 3 / 4 / kParts;  // Wide sums in registers; the others hold operands

typedef float FloatPart __attribute__((vector_size(4 * kPartLanes)));

struct Wide {
  FloatPart part[kParts];
};

// Return the Wide whose part i is of(i).
template <typename Of>
inline Wide of_parts(Of of) {
  Wide x;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) x.part[i] = of(i);
  return x;
}

inline Wide all_wide(float x) {
  return of_parts([=](int) { return FloatPart{} + x; });
}

inline Wide operator*(float a, const Wide& b) {
  return of_parts([&](int i) { return a * b.part[i]; });
}

inline Wide& operator+=(Wide& a, const Wide& b) { return a = of_parts([&](int i) { return a.part[i] + b.part[i]; }); }

inline Wide larger(const Wide& a, const Wide& b) {
  return of_parts([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}

inline Wide load_wide(const float* p) {
  return of_parts([=](int i) {
    FloatPart x;
    std::memcpy(&x, p + i * kPartLanes, sizeof x);
    return x;
  });
}

inline Wide load_wide(const c10::BFloat16* p) {
  typedef uint16_t Bits16 __attribute__((vector_size(2 * kPartLanes)));
  typedef uint32_t Bits32 __attribute__((vector_size(4 * kPartLanes)));
  return of_parts([=](int i) {
    Bits16 bfloat16;
    std::memcpy(&bfloat16, p + i * kPartLanes, sizeof bfloat16);
    const Bits32 bits = __builtin_convertvector(bfloat16, Bits32) << 16;
    FloatPart x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  });
}

inline void store_wide(float* p, const Wide& x) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) std::memcpy(p + i * kPartLanes, &x.part[i], sizeof(FloatPart));
}

// Reduce the lanes pairwise, by halves: join(join(...), join(...)). The compiler would reduce them one by one.
template <typename Join>
float fold_lanes(const Wide& x, Join join) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half halves[2];
  std::memcpy(halves, &x, sizeof x);
  const Half half = join(halves[0], halves[1]);
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof half);
  const Quarter q = join(quarters[0], quarters[1]);
  return join(join(q[0], q[2]), join(q[1], q[3]));
}

inline float sum_lanes(const Wide& x) {
  return fold_lanes(x, [](auto a, auto b) { return a + b; });
}

inline float largest_lane(const Wide& x) {
  return fold_lanes(x, [](auto a, auto b) { return a > b ? a : b; });
}

}  // namespace brorl
