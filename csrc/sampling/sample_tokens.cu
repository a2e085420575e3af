// The sampler on CUDA: one thread block per row, which reads it once for its statistics.
//
// Each warp has one consecutive share of the row and keeps its sum, so a draw first finds the share, then a share of the
// share, down to one token. Cuts are found by bisection on the bits of the logits, with integer weights: no sort, and no
// atomics, so a row gives the same token on every run and beside any neighbours. Bisection goes over a shortlist that a
// second look at the row gathers, and over the row itself only where what is to be kept does not fit there.
#include "sampling/sample_tokens_cuda.h"

#include <cfloat>
#include <cmath>

#include "common/launch.h"
#include "common/philox.h"
#include "sampling/sample_block.h"

namespace brorl {
namespace {

constexpr int kAtOnce = 8;  // logits that a thread reads before it uses them
constexpr int kRank = 256;  // a shortlist begins at no lower rank: that gives a thread of 512 less than one on average
constexpr int kBlocks = 2;  // per multiprocessor; left to itself, the compiler aims for three and spills

struct Settings {
  double temperature, top_p;
  float inverse_temperature;
  float unit;      // weight of the most likely token; a power of two such that a row's sum fits 63 bits
  int top_k;       // 0: off
  int token_bits;  // of the vocabulary, an even number
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

// What bisection goes over: each(f) calls f(logit, image, token) for this thread's part.
struct Largest {
  float logit;
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    f(logit, image(logit), 0);
  }
};

struct Shortlist {
  const Scratch& scratch;
  int count;
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    for (int i = 0; i < count; ++i) {
      const uint32_t here = scratch.images[i][threadIdx.x];
      f(of_image(here), here, scratch.tokens[i][threadIdx.x]);
    }
  }
};

template <typename T>
struct Row {
  const T* logits;
  int vocab;
  float inverse_temperature, peak, unit;
  // Kept are tokens with an image above the threshold, and those equal to it up to this token.
  uint32_t threshold;
  int last_tie;

  __device__ __forceinline__ float logit(int j) const { return widen(logits[j]); }
  __device__ __forceinline__ float exponential(float z) const { return exp_or_zero((z - peak) * inverse_temperature); }
  __device__ __forceinline__ Weight weight(float z) const { return __float2ull_rn(exponential(z) * unit); }
  __device__ __forceinline__ bool keeps(uint32_t here, int j) const {
    return here > threshold || (here == threshold && j <= last_tie);
  }
  __device__ __forceinline__ float mass(int j) const {
    const float z = logit(j);
    return keeps(image(z), j) ? exponential(z) : 0.0f;
  }

  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    for (int64_t j = threadIdx.x; j < vocab; j += kThreads) {
      const float z = logit(int(j));
      f(z, image(z), int(j));
    }
  }
};

// Find the largest logit of the row and of this thread's part, and in scratch.parts the mass of each warp's share
// (greedy: whether it holds the largest). False where the row has NaN, +inf or nothing above -inf.
template <typename T>
__device__ __forceinline__ bool read_once(Row<T>& row, bool greedy, float& largest, Scratch& scratch) {
  const Share share(0, row.vocab);
  const float scale = row.inverse_temperature;
  largest = -INFINITY;
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

// Of keys of `bits` bits, the largest such that the items at or above it weigh at least `goal`, two bits at a time;
// `above`: what those above it weigh. Bits below `low` are not looked at.
template <typename Items, typename Key, typename Weigh>
__device__ __forceinline__ uint32_t bisect(
    const Items& items, Key key_of, Weigh weigh, int bits, int low, Weight goal, Weight& above, Scratch& scratch) {
  uint32_t found = 0;
  above = 0;
  for (int shift = bits - 2; shift >= low; shift -= 2) {
    const uint32_t first = found + (1u << shift), second = found + (2u << shift), third = found + (3u << shift);
    Weight a = 0, b = 0, c = 0;
    items.each([&](float z, uint32_t here, int j) {
      const uint32_t key = key_of(here, j);
      if (key < first) return;
      const Weight w = weigh(z, here, j);
      a += w;
      if (key >= second) b += w;
      if (key >= third) c += w;
    });
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

// The largest image such that the items at or above it weigh at least `goal`; one below theirs where all weigh less.
template <typename T, typename Items, typename Weigh>
__device__ __forceinline__ uint32_t cut_image(
    const Items& items, Weigh weigh, Weight goal, Weight& above, Scratch& scratch) {
  constexpr int low = sizeof(T) == 2 ? 16 : 0;  // of a bfloat16 the rest follows from the sign
  const auto key = [](uint32_t here, int) { return here; };
  const uint32_t found = bisect(items, key, weigh, 32, low, goal, above, scratch);
  return low && !(found >> 31) ? found | 0xffffu : found;
}

// The first token up to which the items weigh at least `goal`, which they do together.
template <typename Items, typename Weigh>
__device__ __forceinline__ int first_token(
    const Items& items, Weigh weigh, Weight goal, const Settings& settings, Scratch& scratch) {
  const uint32_t last = 0xffffffffu >> (32 - settings.token_bits);
  const auto key = [=](uint32_t, int j) { return last - uint32_t(j); };
  Weight above;
  return int(last - bisect(items, key, weigh, settings.token_bits, 0, goal, above, scratch));
}

template <typename Items, typename Weigh>
__device__ __forceinline__ Weight sum(const Items& items, Weigh weigh, Scratch& scratch) {
  Weight whole = 0, none = 0, nothing = 0;
  items.each([&](float z, uint32_t here, int j) { whole += weigh(z, here, j); });
  block_sum(whole, none, nothing, scratch);
  return whole;
}

// Of the tokens with the threshold's image, which are to be kept up to the n-th of them: that one.
template <typename T>
__device__ __forceinline__ int nth_tie(
    const Row<T>&, const Shortlist& list, uint32_t threshold, Weight n, const Settings& settings, Scratch& scratch) {
  return first_token(
      list, [=](float, uint32_t here, int) { return Weight(here == threshold); }, n, settings, scratch);
}

template <typename T>
__device__ __forceinline__ int nth_tie(
    const Row<T>&, const Row<T>& row, uint32_t threshold, Weight n, const Settings&, Scratch& scratch) {
  const auto is_tie = [&](int j) { return image(row.logit(j)) == threshold ? 1.0 : 0.0; };
  sum_shares(is_tie, 0, row.vocab, scratch);
  return find(is_tie, row.vocab, double(n - 1), scratch);
}

// Gather each thread's tokens at or above the rank-th of the threads' largest logits: all of no lower rank are among
// them, but for logits of -inf, which have no weight. `whole`: the weight of the row, where top-k is off. False where a
// thread has more of them than it can hold.
template <typename T>
__device__ __forceinline__ bool gather(
    const Row<T>& row, float largest, const Settings& settings, Shortlist& list, Weight& whole, Scratch& scratch) {
  const Weight rank = settings.top_k ? settings.top_k : kRank;
  if (rank > kRank) return false;
  Weight above, own = 0, none = 0, nothing = 0;
  const auto one = [](float, uint32_t, int) { return Weight(1); };
  const uint32_t least = cut_image<T>(Largest{largest}, one, rank, above, scratch);
  row.each([&](float z, uint32_t here, int j) {
    if (!settings.top_k) own += row.weight(z);
    if (here < least || z == -INFINITY) return;
    if (list.count < kHeld) {
      scratch.images[list.count][threadIdx.x] = here;
      scratch.tokens[list.count][threadIdx.x] = j;
    }
    ++list.count;
  });
  block_sum(own, none, nothing, scratch);
  whole = own;
  return !__syncthreads_or(list.count > kHeld);
}

// Raise the row's threshold to the last token that top-k and top-p keep, which is looked for among `items`: the row, or
// its shortlist (not `all` of it). top-p keeps the most likely tokens whose weight reaches its share of `whole`, or of
// what top-k keeps; of equal logits the first tokens come first. False where the items do not weigh so much.
template <typename T, typename Items>
__device__ __forceinline__ bool cut(
    Row<T>& row, const Items& items, bool all, Weight whole, const Settings& settings, Scratch& scratch) {
  Weight above;
  if (settings.top_k) {
    const auto one = [](float, uint32_t, int) { return Weight(1); };
    row.threshold = cut_image<T>(items, one, settings.top_k, above, scratch);
  }
  if (settings.top_p == 1) return true;
  const uint32_t least = row.threshold;
  const auto weigh = [&](float z, uint32_t here, int) { return here >= least ? row.weight(z) : Weight(0); };
  const Weight held = all && !settings.top_k ? whole : sum(items, weigh, scratch);
  if (settings.top_k) whole = held;
  const double share = ceil(settings.top_p * double(whole));
  const Weight goal = share < 1 ? 1 : (share < double(whole) ? Weight(share) : whole);
  if (held < goal) return false;

  const uint32_t threshold = cut_image<T>(items, weigh, goal, above, scratch);
  const Weight each = row.weight(of_image(threshold));
  row.last_tie = nth_tie(row, items, threshold, (goal - above + each - 1) / each, settings, scratch);
  row.threshold = threshold;
  return true;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks) sample_row(
    const T* logits, int vocab, int64_t stride, const int64_t* keys, const int64_t* index, const int64_t* position,
    Settings settings, int64_t* ids, float* log_probs) {
  __shared__ Scratch scratch;
  const int64_t r = blockIdx.x;
  Row<T> row{logits + r * stride, vocab, settings.inverse_temperature, 0, settings.unit, 0, vocab};
  const bool greedy = settings.temperature == 0, cuts = !greedy && (settings.top_k || settings.top_p < 1);
  int64_t id = -1;
  float log_prob = NAN, largest;
  if (read_once(row, greedy, largest, scratch)) {
    const double uniform = greedy ? 0 : philox_uniform(keys[r], index[r], position[r]);
    Shortlist list{scratch, 0};
    Weight whole = 0;
    double sum_kept;
    const bool listed = cuts && gather(row, largest, settings, list, whole, scratch);
    if (listed && cut(row, list, false, whole, settings, scratch)) {
      const auto weigh = [&](float z, uint32_t here, int j) { return row.keeps(here, j) ? row.weight(z) : Weight(0); };
      const Weight kept = sum(list, weigh, scratch), before = Weight(uniform * double(kept));
      id = first_token(list, weigh, before < kept ? before + 1 : kept, settings, scratch);
      sum_kept = double(kept) / settings.unit;
    } else {
      const auto mass = [&](int j) { return greedy ? double(row.logit(j) == row.peak) : double(row.mass(j)); };
      if (cuts) {
        row.threshold = 0;
        cut(row, row, true, whole, settings, scratch);
        __syncthreads();  // the parts are read before they are written again
        sum_shares(mass, 0, vocab, scratch);
      }
      sum_kept = total(scratch);
      id = find(mass, vocab, uniform * sum_kept, scratch);
    }
    if (greedy) {
      log_prob = 0;
    } else if (threadIdx.x == 0) {
      log_prob = float((double(row.logit(int(id))) - row.peak) / settings.temperature - log(sum_kept));
    }
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
      int(top_k < vocab ? top_k : 0), bits < 2 ? 2 : bits + bits % 2};
  if (bfloat16) {
    return launch_kernel(
        sample_row<uint16_t>, rows, kThreads, stream, static_cast<const uint16_t*>(logits), int(vocab), stride, keys,
        index, position, settings, ids, log_probs);
  }
  return launch_kernel(
      sample_row<float>, rows, kThreads, stream, static_cast<const float*>(logits), int(vocab), stride, keys, index,
      position, settings, ids, log_probs);
}

}  // namespace brorl
