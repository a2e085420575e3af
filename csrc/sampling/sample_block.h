// What a block of threads does together for one row: sums, shares of the row, and finding a token by them.
// For .cu files only.
#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_runtime.h>

namespace brorl {
namespace {

using Weight = unsigned long long;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kHeld = 8;  // tokens of a shortlist that a thread can hold
constexpr unsigned kAllLanes = 0xffffffffu;

struct Scratch {
  double parts[kWarps];
  Weight weights[kWarps][3];
  float largest[kWarps];
  uint32_t images[kHeld][kThreads];  // of the shortlist; a thread reads what it wrote
  int tokens[kHeld][kThreads];
};

template <typename X>
__device__ __forceinline__ X warp_sum(X x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// The sums of a, b and c over the block, in place, for every thread.
__device__ __forceinline__ void block_sum(Weight& a, Weight& b, Weight& c, Scratch& scratch) {
  Weight* own = scratch.weights[threadIdx.x / 32];
  a = warp_sum(a), b = warp_sum(b), c = warp_sum(c);
  if (threadIdx.x % 32 == 0) own[0] = a, own[1] = b, own[2] = c;
  __syncthreads();
  a = b = c = 0;
  for (int i = 0; i < kWarps; ++i) a += scratch.weights[i][0], b += scratch.weights[i][1], c += scratch.weights[i][2];
  __syncthreads();
}

// The share of this thread's warp in the tokens [begin, end).
struct Share {
  int from, to, size;
  __device__ __forceinline__ Share(int begin, int end) {
    size = (end - begin + kWarps - 1) / kWarps;
    from = min(int64_t(end), begin + int64_t(size) * (threadIdx.x / 32));
    to = min(int64_t(end), int64_t(from) + size);
  }
};

// scratch.parts = the sum of mass(token) over each warp's share of [begin, end).
template <typename Mass>
__device__ __forceinline__ void sum_shares(Mass mass, int begin, int end, Scratch& scratch) {
  const Share share(begin, end);
  double sum = 0;
  for (int64_t j = share.from + int(threadIdx.x % 32); j < share.to; j += 32) sum += mass(int(j));
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) scratch.parts[threadIdx.x / 32] = sum;
  __syncthreads();
}

__device__ __forceinline__ double total(const Scratch& scratch) {
  double sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += scratch.parts[i];
  return sum;
}

// The first token of [0, vocab) at which the running sum of mass exceeds `target`; sum_shares has been done for the
// whole row. A share without mass is never taken, and rounding cannot lead past the last one with mass.
template <typename Mass>
__device__ __forceinline__ int find(Mass mass, int vocab, double target, Scratch& scratch) {
  int begin = 0, end = vocab;
  for (;;) {
    int chosen = 0;
    double running = 0, before = 0;
    for (int i = 0; i < kWarps; ++i) {
      const double part = scratch.parts[i];
      if (part == 0) continue;
      chosen = i;
      before = running;
      running += part;
      if (running > target) break;
    }
    target -= before;
    const int size = Share(begin, end).size;
    begin += chosen * size;
    end = min(int64_t(end), int64_t(begin) + size);
    if (end - begin <= 1) return begin;
    __syncthreads();  // the parts are read before they are written again
    sum_shares(mass, begin, end, scratch);
  }
}

}  // namespace
}  // namespace brorl
