// The sampler on CUDA: one thread block per row, which reads it once for its statistics.
//
// Each warp has one consecutive share of the row and keeps its sum, so a draw first finds the share, then a share of the
// share, down to one token. Cuts are found by bisection on the bits of the logits, with integer weights: no sort, and no
// atomics, so a row gives the same token on every run and beside any neighbours.
#include "sampling/sample_tokens_cuda.h"

#include <cfloat>
#include <cmath>

#include <cuda_runtime.h>

#include "common/philox.h"

namespace brorl {
namespace {

using Weight = unsigned long long;

constexpr int kThreads = 512, kWarps = kThreads / 32, kAtOnce = 8;
constexpr int kBlocks = 2;  // per multiprocessor; left to itself, the compiler aims for three and spills
constexpr unsigned kAllLanes = 0xffffffffu;

struct Settings {
  double temperature, top_p;
  float inverse_temperature;
  float unit;  // weight of the most likely token; a power of two such that a row's sum fits 63 bits
  int top_k;
};

struct Scratch {
  double parts[kWarps];
  Weight weights[kWarps][3];
  float largest[kWarps];
};

// Adding 0 turns -0 into 0, so that equal logits have equal images.
__device__ __forceinline__ float widen(float logit) { return logit + 0.0f; }
__device__ __forceinline__ float widen(uint16_t bfloat16) { return __uint_as_float(uint32_t(bfloat16) << 16) + 0.0f; }

// Integers in the order of the floats, and back.
__device__ __forceinline__ uint32_t image(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float of_image(uint32_t image) {
  return __uint_as_float(image ^ (image >> 31 ? 0x80000000u : 0xffffffffu));
}

// As fast_exp on the CPU, 0 below the normal float32 range.
__device__ __forceinline__ float exp_or_zero(float x) { return x < -87.3f ? 0.0f : expf(x); }

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

template <typename T>
struct Row {
  const T* logits;
  int vocab;
  float inverse_temperature, peak;
  // Kept are tokens with an image above the threshold, and those equal to it up to this token.
  uint32_t threshold;
  int last_tie;

  __device__ __forceinline__ float logit(int j) const { return widen(logits[j]); }
  __device__ __forceinline__ float exponential(float z) const { return exp_or_zero((z - peak) * inverse_temperature); }
  __device__ __forceinline__ float mass(int j) const {
    const float z = logit(j);
    const uint32_t here = image(z);
    return here > threshold || (here == threshold && j <= last_tie) ? exponential(z) : 0.0f;
  }
};

// Find the row's largest logit, and in scratch.parts the mass of each warp's share (greedy: whether it holds the
// largest). False where the row has NaN, +inf or nothing above -inf.
template <typename T>
__device__ __forceinline__ bool read_once(Row<T>& row, bool greedy, Scratch& scratch) {
  const Share share(0, row.vocab);
  const float scale = row.inverse_temperature;
  float largest = -INFINITY;
  double sum = 0;  // relative to the largest logit of this thread so far
  for (int64_t j = share.from + int(threadIdx.x % 32); j < share.to; j += 32 * kAtOnce) {
    float z[kAtOnce], most = largest;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      z[i] = j + 32 * i < share.to ? row.logit(int(j) + 32 * i) : -INFINITY;
      most = fmaxf(most, z[i]);
    }
    const float base = most == -INFINITY ? 0.0f : most;  // -inf - -inf would be NaN
    float partial = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) partial += exp_or_zero((z[i] - base) * scale);
    sum = sum * exp_or_zero((largest - base) * scale) + partial;
    largest = most;
  }
  const float most = warp_max(largest);
  if (threadIdx.x % 32 == 0) scratch.largest[threadIdx.x / 32] = most;
  if (__syncthreads_or(sum != sum)) return false;  // from NaN or +inf
  row.peak = -INFINITY;
  for (int i = 0; i < kWarps; ++i) row.peak = fmaxf(row.peak, scratch.largest[i]);
  if (row.peak == -INFINITY) return false;
  const double mass = warp_sum(sum * exp_or_zero((largest - row.peak) * scale));
  if (threadIdx.x % 32 == 0) scratch.parts[threadIdx.x / 32] = greedy ? double(most == row.peak) : mass;
  __syncthreads();
  return true;
}

// The largest image such that the tokens at or above it weigh at least `goal`, two bits at a time; `above`: what those
// above it weigh.
template <typename T, typename Weigh>
__device__ __forceinline__ uint32_t bisect(const Row<T>& row, Weigh weigh, Weight goal, Weight& above, Scratch& scratch) {
  uint32_t found = 0;
  above = 0;
  for (int shift = 30; shift >= 0; shift -= 2) {
    const uint32_t first = found + (1u << shift), second = found + (2u << shift), third = found + (3u << shift);
    Weight a = 0, b = 0, c = 0;
    for (int64_t j = threadIdx.x; j < row.vocab; j += kThreads) {
      const float z = row.logit(int(j));
      const uint32_t here = image(z);
      if (here < first) continue;
      const Weight w = weigh(z, here);
      a += w;
      if (here >= second) b += w;
      if (here >= third) c += w;
    }
    block_sum(a, b, c, scratch);
    if (c >= goal) {
      found = third;
    } else if (b >= goal) {
      found = second, above = c;
    } else if (a >= goal) {
      found = first, above = b;
    } else {
      above = a;
    }
  }
  return found;
}

// Raise the row's threshold to the last of the most likely tokens whose mass reaches top_p of what is kept; of equal
// logits the first tokens come first.
template <typename T>
__device__ __forceinline__ void keep_nucleus(Row<T>& row, const Settings& settings, Scratch& scratch) {
  const uint32_t least = row.threshold;
  const float unit = settings.unit;
  const auto weigh = [&](float z, uint32_t here) {
    return here >= least ? Weight(__float2ull_rn(row.exponential(z) * unit)) : Weight(0);
  };
  Weight whole = 0, none = 0, nothing = 0;
  for (int64_t j = threadIdx.x; j < row.vocab; j += kThreads) {
    const float z = row.logit(int(j));
    whole += weigh(z, image(z));
  }
  block_sum(whole, none, nothing, scratch);
  const double share = ceil(settings.top_p * double(whole));
  const Weight goal = share < 1 ? 1 : (share < double(whole) ? Weight(share) : whole);
  Weight above;
  const uint32_t threshold = bisect(row, weigh, goal, above, scratch);
  const Weight each = weigh(of_image(threshold), threshold);
  const Weight ties = (goal - above + each - 1) / each;
  const auto is_tie = [&](int j) { return image(row.logit(j)) == threshold ? 1.0 : 0.0; };
  sum_shares(is_tie, 0, row.vocab, scratch);
  row.last_tie = find(is_tie, row.vocab, double(ties - 1), scratch);
  row.threshold = threshold;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks) sample_row(
    const T* logits, int vocab, int64_t stride, const int64_t* keys, const int64_t* index, const int64_t* position,
    Settings settings, int64_t* ids, float* log_probs) {
  __shared__ Scratch scratch;
  const int64_t r = blockIdx.x;
  Row<T> row{logits + r * stride, vocab, settings.inverse_temperature, 0, 0, vocab};
  const bool greedy = settings.temperature == 0;
  int64_t id = -1;
  float log_prob = NAN;
  if (read_once(row, greedy, scratch)) {
    const auto mass = [&](int j) { return greedy ? double(row.logit(j) == row.peak) : double(row.mass(j)); };
    const bool top_k = !greedy && settings.top_k && settings.top_k < vocab, top_p = !greedy && settings.top_p < 1;
    if (top_k) {
      Weight above;
      row.threshold = bisect(row, [](float, uint32_t) { return Weight(1); }, settings.top_k, above, scratch);
    }
    if (top_p) keep_nucleus(row, settings, scratch);
    if (top_k || top_p) {
      __syncthreads();  // the parts are read before they are written again
      sum_shares(mass, 0, vocab, scratch);
    }
    const double sum = total(scratch);
    const double uniform = greedy ? 0 : philox_uniform(keys[r], index[r], position[r]);
    id = find(mass, vocab, uniform * sum, scratch);
    const double nats = (double(row.logit(int(id))) - row.peak) / settings.temperature - log(sum);
    log_prob = greedy ? 0.0f : float(nats);
  }
  if (threadIdx.x == 0) {
    ids[r] = id;
    log_probs[r] = log_prob;
  }
}

}  // namespace

const char* sample_tokens_launch(
    const void* logits, bool bfloat16, int64_t rows, int64_t vocab, int64_t stride, const int64_t* keys,
    const int64_t* index, const int64_t* position, double temperature, double top_p, int64_t top_k, int64_t* ids,
    float* log_probs, CUstream_st* stream) {
  int bits = 0;
  while ((int64_t(1) << bits) < vocab) ++bits;
  const double inverse = temperature > 0 ? 1 / temperature : 1;  // bounded below, so that 0 times it stays 0
  const Settings settings{
      temperature, top_p, inverse < FLT_MAX ? float(inverse) : FLT_MAX, float(std::ldexp(1.0, 62 - bits)),
      int(top_k < vocab ? top_k : 0)};
  if (bfloat16) {
    sample_row<<<unsigned(rows), kThreads, 0, stream>>>(
        static_cast<const uint16_t*>(logits), int(vocab), stride, keys, index, position, settings, ids, log_probs);
  } else {
    sample_row<<<unsigned(rows), kThreads, 0, stream>>>(
        static_cast<const float*>(logits), int(vocab), stride, keys, index, position, settings, ids, log_probs);
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace brorl
