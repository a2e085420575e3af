// Sixteen floats at once, read from float32 or bfloat16.
#pragma once

#include <cstdint>
#include <cstring>

#include <c10/util/BFloat16.h>

namespace brorl {

constexpr int64_t kWide = 16;
typedef float Wide __attribute__((vector_size(64)));

inline Wide load_wide(const float* p) {
  Wide x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Wide load_wide(const c10::BFloat16* p) {
  typedef uint16_t Half __attribute__((vector_size(32)));
  typedef uint32_t Bits __attribute__((vector_size(64)));
  Half half;
  std::memcpy(&half, p, sizeof half);
  const Bits bits = __builtin_convertvector(half, Bits) << 16;
  Wide x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline void store_wide(float* p, Wide x) { std::memcpy(p, &x, sizeof x); }

// The lanes taken together in pairs, by halves: join(join(...), join(...)). The compiler folds them one by one otherwise.
template <typename Join>
float fold_lanes(Wide x, Join join) {
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

inline float sum_lanes(Wide x) {
  return fold_lanes(x, [](auto a, auto b) { return a + b; });
}

inline float largest_lane(Wide x) {
  return fold_lanes(x, [](auto a, auto b) { return a > b ? a : b; });
}

}  // namespace brorl
