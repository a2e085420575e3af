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

}  // namespace brorl
