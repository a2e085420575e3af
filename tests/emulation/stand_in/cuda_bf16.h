// Replaces CUDA's header: rounding to the nearest bfloat16, ties to even.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
