// Replaces CUDA's header when g++ compiles the .cu files of csrc: CUDA's keywords and functions, by
// emulation/machine.h.
#pragma once

#include <math.h>  // not <cmath>: kernels call exp without std::, for float and double

#include <cstdint>
#include <cstring>

#include "machine.h"

struct CUstream_st;
using cudaStream_t = CUstream_st*;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local  // blocks run one after another; see machine.cpp

using emulation::blockIdx;
using emulation::threadIdx;
using emulation::Place;

inline void __syncthreads(Place place = Place::here()) { emulation::meet_block(place); }

namespace emulation {

// Return the value of lane `from`, or this lane's value if `from` is outside of the warp.
template <typename T>
T shuffle(unsigned mask, T value, unsigned from, Place place) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const uint64_t* const of_lanes = meet_warp(mask, bits, place);
  if (from >= 32) return value;
  if (!(mask >> from & 1)) fail("a shuffle reads a lane outside its mask", place);
  std::memcpy(&value, of_lanes + from, sizeof value);
  return value;
}

inline unsigned lane() { return threadIdx.x % 32; }

}  // namespace emulation

template <typename T>
T __shfl_down_sync(unsigned mask, T x, unsigned step, Place place = Place::here()) {
  return emulation::shuffle(mask, x, emulation::lane() + step, place);
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
