// One warp per segment or group. A warp takes a segment in tiles of 32 tokens, last tile first; the recursion is a map
// from the next advantage to this one, and maps compose, so a tile costs five shuffles instead of 32 steps.
#include "policy/advantages_cuda.h"

#include "common/block_reduce.h"
#include "common/launch.h"
#include "policy/advantages_math.h"

namespace brorl {
namespace {

constexpr int kWarpsPerBlock = kThreads / kWarp;

__device__ __forceinline__ int64_t warp_index() {
  return int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
}

// The same bits in every lane: both sides of each exchange add the same two numbers.
__device__ __forceinline__ double warp_sum(double x) {
  for (int step = kWarp / 2; step; step /= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
  return x;
}

template <typename S>
__global__ void __launch_bounds__(kThreads) gae_kernel(
    const S* rewards, const S* values, const int64_t* starts, const bool* mask, const S* bootstrap, double gamma,
    double lambda, int64_t segments, S* advantages, S* returns) {
  const int64_t segment = warp_index();
  if (segment >= segments) return;  // a whole warp
  const int lane = threadIdx.x % kWarp;
  const int64_t begin = starts[segment];
  double next_value = bootstrap ? double(bootstrap[segment]) : 0, next_advantage = 0;  // those after the tile
  for (int64_t end = starts[segment + 1]; end > begin; end -= kWarp) {
    const int64_t t = end - kWarp + lane;
    const bool counts = t >= begin && (!mask || mask[t]);
    const double value = counts ? double(values[t]) : 0, reward = counts ? double(rewards[t]) : 0;
    const unsigned counting = __ballot_sync(kWholeWarp, counts);
    const unsigned later = counting & ~((2u << lane) - 1);  // lane 31: 2 << 31 is 0, so none
    const double following = __shfl_sync(kWholeWarp, value, later ? __ffs(int(later)) - 1 : 0);
    const double delta = td_error<double>(reward, value, later ? following : next_value, gamma);
    Affine map = counts ? gae_step(delta, gamma, lambda) : gae_skip();
    for (int step = 1; step < kWarp; step *= 2) {
      const Affine inner = {
          __shfl_down_sync(kWholeWarp, map.offset, step), __shfl_down_sync(kWholeWarp, map.slope, step)};
      if (lane + step < kWarp) map = compose(map, inner);
    }
    const double advantage = map(next_advantage);
    if (t >= begin) {
      advantages[t] = counts ? S(advantage) : S(0);
      returns[t] = counts ? S(advantage + value) : S(0);
    }
    next_advantage = __shfl_sync(kWholeWarp, advantage, 0);
    const double first = __shfl_sync(kWholeWarp, value, counting ? __ffs(int(counting)) - 1 : 0);
    next_value = counting ? first : next_value;
  }
}

// A lane's rewards of a group: every 32nd from `begin`. The first kHeld stay in registers, so that a group of up to 512
// is read once; of a larger one the rest is read at each look.
template <typename S>
struct LaneRewards {
  static constexpr int kHeld = 16;
  const S* rewards;
  const bool* mask;
  int64_t begin, end;
  S held[kHeld];
  unsigned counted = 0;  // a bit for each that is held

  __device__ __forceinline__ LaneRewards(const S* rewards, const bool* mask, int64_t begin, int64_t end)
      : rewards(rewards), mask(mask), begin(begin), end(end) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t i = begin + k * kWarp;
      const bool counts = i < end && (!mask || mask[i]);
      held[k] = counts ? rewards[i] : S(0);
      counted |= unsigned(counts) << k;
    }
  }

  // f(reward, whether it counts, its index), in order.
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (begin + k * kWarp < end) f(held[k], bool(counted >> k & 1), begin + k * kWarp);
    }
    for (int64_t i = begin + kHeld * kWarp; i < end; i += kWarp) {
      const bool counts = !mask || mask[i];
      f(counts ? rewards[i] : S(0), counts, i);
    }
  }
};

template <typename S>
__global__ void __launch_bounds__(kThreads) group_kernel(
    const S* rewards, const int64_t* starts, const bool* mask, bool by_std, int64_t groups, S* advantages) {
  const int64_t group = warp_index();
  if (group >= groups) return;  // a whole warp
  const LaneRewards<S> own(rewards, mask, starts[group] + threadIdx.x % kWarp, starts[group + 1]);
  double count = 0, sum = 0, m2 = 0;
  S first = 0;
  bool equal = true;  // all of this lane's rewards
  own.each([&](S reward, bool counts, int64_t) {
    if (!counts) return;
    if (count == 0) first = reward;
    equal = equal && reward == first;
    sum += double(reward);
    count += 1;
  });
  // Equal in the group where equal in each lane and to the first lane that has any.
  const unsigned filled = __ballot_sync(kWholeWarp, count > 0);
  const S common = __shfl_sync(kWholeWarp, first, filled ? __ffs(int(filled)) - 1 : 0);
  equal = __all_sync(kWholeWarp, count == 0 || (equal && first == common));
  count = warp_sum(count);
  const double mean = warp_sum(sum) / count;  // not used where count is 0
  if (by_std) {
    own.each([&](S reward, bool counts, int64_t) {
      const double deviation = counts ? double(reward) - mean : 0;
      m2 += deviation * deviation;
    });
  }
  const double divisor = group_divisor(warp_sum(m2), count, by_std);
  const bool flat = count <= 1 || equal;
  own.each([&](S reward, bool counts, int64_t i) {
    advantages[i] = flat || !counts ? S(0) : S((double(reward) - mean) / divisor);
  });
}

template <typename S>
const char* launch_gae(
    const S* rewards, const S* values, const int64_t* starts, const bool* mask, const S* bootstrap, double gamma,
    double lambda, int64_t segments, S* advantages, S* returns, cudaStream_t stream) {
  if (!segments) return nullptr;
  const int64_t blocks = (segments + kWarpsPerBlock - 1) / kWarpsPerBlock;
  return launch_kernel(
      gae_kernel<S>, blocks, kThreads, stream, rewards, values, starts, mask, bootstrap, gamma, lambda, segments,
      advantages, returns);
}

template <typename S>
const char* launch_groups(
    const S* rewards, const int64_t* starts, const bool* mask, bool by_std, int64_t groups, S* advantages,
    cudaStream_t stream) {
  if (!groups) return nullptr;
  const int64_t blocks = (groups + kWarpsPerBlock - 1) / kWarpsPerBlock;
  return launch_kernel(
      group_kernel<S>, blocks, kThreads, stream, rewards, starts, mask, by_std, groups, advantages);
}

}  // namespace

BRORL_GAE_LAUNCH(float) {
  return launch_gae(rewards, values, starts, mask, bootstrap, gamma, lambda, segments, advantages, returns, stream);
}

BRORL_GAE_LAUNCH(double) {
  return launch_gae(rewards, values, starts, mask, bootstrap, gamma, lambda, segments, advantages, returns, stream);
}

BRORL_GROUP_LAUNCH(float) { return launch_groups(rewards, starts, mask, by_std, groups, advantages, stream); }
BRORL_GROUP_LAUNCH(double) { return launch_groups(rewards, starts, mask, by_std, groups, advantages, stream); }

}  // namespace brorl
