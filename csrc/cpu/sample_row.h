// Sampling of one row on a CPU. The logits are read from memory once, block by block.
//
// Every block keeps its largest logit and the sum of exp((logit - largest) / temperature), so a draw first finds the
// block and then the token in it. Sums are in float over a block and in double over the blocks, in an order that
// depends only on the row. top_p and top_k become a threshold, so that only logits close to it are sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "common/fast_exp.h"

namespace brorl {

struct SampleSettings {
  double temperature;  // 0: the first of the largest logits
  double top_p;        // 1: off
  int64_t top_k;       // 0: off
};

struct Drawn {
  int64_t id;  // -1: the row has NaN, +inf or nothing above -inf
  float log_prob;
};

inline const float* widen(const float* logits, int64_t, float*) { return logits; }

inline const float* widen(const uint16_t* bfloat16, int64_t n, float* out) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t bits = uint32_t(bfloat16[j]) << 16;
    std::memcpy(out + j, &bits, sizeof bits);
  }
  return out;
}

// Samples rows of `vocab` logits one after another; one object per thread. T: float, or uint16_t holding bfloat16.
template <typename T>
class RowSampler {
 public:
  RowSampler(int64_t vocab, SampleSettings settings)
      : vocab_(vocab),
        blocks_((vocab + kBlock - 1) / kBlock),
        settings_(settings),
        // It is finite, so that 0 times it is 0.
        inverse_temperature_(
            settings.temperature > 0 ? float(std::min(1 / settings.temperature, double(kMax))) : 1.0f),
        largest_(blocks_),
        sums_(blocks_),
        masses_(blocks_) {}

  Drawn draw(const T* row, double uniform) {
    row_ = row;
    threshold_ = -kInfinity;
    last_tie_ = vocab_;
    for (int64_t b = 0; b < blocks_; ++b) scan(b);
    peak_ = *std::max_element(largest_.begin(), largest_.end());
    weigh();
    // NaN and +inf have made their block's sum NaN.
    if (peak_ == -kInfinity || total_ != total_) return {-1, std::numeric_limits<float>::quiet_NaN()};
    if (settings_.temperature == 0) return {first_maximum(), 0};
    if (settings_.top_k && settings_.top_k < vocab_) {
      threshold_ = kth_largest(settings_.top_k);
      cut();
    }
    if (settings_.top_p < 1) {
      keep_nucleus(settings_.top_p * total_);
      cut();
    }
    return pick(uniform * total_);
  }

 private:
  static constexpr int64_t kBlock = 512;  // its logits stay in the L1 cache between the two passes of scan
  static constexpr int64_t kLanes = 16;   // divides kBlock
  static constexpr int kBins = 1024;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity(), kMax = std::numeric_limits<float>::max();

  struct Candidate {
    float logit;
    int64_t id;
  };

  int64_t size(int64_t block) const { return std::min(kBlock, vocab_ - block * kBlock); }
  const float* logits(int64_t block) { return widen(row_ + block * kBlock, size(block), widened_); }

  // Fill exponentials_ with exp((logit - largest of the block) / temperature), 0 for excluded tokens; return the sum.
  template <bool kCut>
  float exponentiate(const float* z, int64_t block) {
    const int n = int(size(block));
    const float largest = largest_[block] == -kInfinity ? 0.0f : largest_[block];  // -inf - -inf would be NaN
    const float scale = inverse_temperature_, threshold = threshold_;
    const int last_tie = int(std::clamp(last_tie_ - block * kBlock, int64_t(-1), kBlock));
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; ++j) {
      float e = fast_exp((z[j] - largest) * scale);
      if (kCut) e = (z[j] > threshold) | ((z[j] == threshold) & (j <= last_tie)) ? e : 0.0f;
      exponentials_[j] = e;
      sum += e;
    }
    return sum;
  }

  void scan(int64_t block) {
    const float* z = logits(block);
    const int64_t n = size(block);
    float largest = -kInfinity;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < n; ++j) largest = z[j] > largest ? z[j] : largest;
    largest_[block] = largest;
    sums_[block] = exponentiate<false>(z, block);
  }

  // Set masses_ to sums_ relative to the row's largest logit, and total_ to their sum.
  void weigh() {
#pragma omp simd
    for (int64_t b = 0; b < blocks_; ++b) {
      masses_[b] = double(sums_[b]) * fast_exp((largest_[b] - peak_) * inverse_temperature_);
    }
    total_ = 0;
    for (const double mass : masses_) total_ += mass;
  }

  // Recompute the sums of the tokens that threshold_ and last_tie_ keep. Most blocks are below the threshold.
  void cut() {
    for (int64_t b = 0; b < blocks_; ++b) {
      sums_[b] = largest_[b] < threshold_ ? 0.0f : exponentiate<true>(logits(b), b);
    }
    weigh();
  }

  int64_t first_maximum() {
    const int64_t b = std::find(largest_.begin(), largest_.end(), peak_) - largest_.begin();
    const float* z = logits(b);
    return b * kBlock + (std::find(z, z + size(b), peak_) - z);
  }

  static float select(float* values, int64_t n, int64_t k) {
    std::nth_element(values, values + (k - 1), values + n, std::greater<float>());
    return values[k - 1];
  }

  // The k-th largest of the maxima of disjoint groups is at most the k-th largest logit, and few logits exceed it.
  float kth_largest(int64_t k) {
    maxima_.clear();
    if (k <= blocks_) {
      maxima_ = largest_;
    } else if (k <= blocks_ * kLanes) {
      for (int64_t b = 0; b < blocks_; ++b) lane_maxima(b);
    }
    const float floor = maxima_.empty() ? -kInfinity : select(maxima_.data(), int64_t(maxima_.size()), k);
    above_.resize(vocab_ + 1);
    float* const above = above_.data();
    int64_t count = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      if (largest_[b] < floor) continue;
      const float* z = logits(b);
      const int64_t n = size(b);
      for (int64_t j = 0; j < n; ++j) {  // without a branch: the next logit overwrites one that is too small
        above[count] = z[j];
        count += z[j] >= floor;
      }
    }
    return select(above, count, k);
  }

  void lane_maxima(int64_t block) {
    const float* z = logits(block);
    const int64_t n = size(block);
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, -kInfinity);
    for (int64_t j = 0; j + kLanes <= n; j += kLanes) {
#pragma omp simd
      for (int64_t i = 0; i < kLanes; ++i) lanes[i] = z[j + i] > lanes[i] ? z[j + i] : lanes[i];
    }
    for (int64_t j = n - n % kLanes; j < n; ++j) lanes[j % kLanes] = std::max(lanes[j % kLanes], z[j]);
    maxima_.insert(maxima_.end(), lanes, lanes + kLanes);
  }

  // Return how many bins a logit is below the largest, not rounded. It is monotone, so bins never interleave.
  float bin_position(float logit, float bins_per_nat) const {
    return (peak_ - logit) * inverse_temperature_ * bins_per_nat;
  }

  // Fill bins_ and exponentials_, relative to the row's largest logit; tokens below the threshold get the last bin.
  void sort_into_bins(const float* z, int n, float bins_per_nat) {
    const float last = kBins - 1, peak = peak_, scale = inverse_temperature_, threshold = threshold_;
#pragma omp simd
    for (int j = 0; j < n; ++j) {
      const float below = (peak - z[j]) * scale;
      const float position = below * bins_per_nat;
      bins_[j] = int32_t((position < last) & (z[j] >= threshold) ? position : last);
      exponentials_[j] = fast_exp(-below);
    }
  }

  // Raise the threshold to the last of the most likely tokens whose mass reaches `goal`. Of equal logits the first
  // tokens count first.
  void keep_nucleus(double goal) {
    // Tokens that each have less than (1 - top_p) total_ / vocab_ together have less than (1 - top_p) total_. So the
    // nucleus ends above them, and the last bin may start there.
    const double range = std::log(double(vocab_) / ((1 - settings_.top_p) * total_));
    const float bins_per_nat = float((kBins - 1) / std::clamp(range, 1.0, 88.0));  // exp(-88) is 0 in fast_exp
    double mass[kBins] = {};
    for (int64_t b = 0; b < blocks_; ++b) {
      if (largest_[b] < threshold_ || bin_position(largest_[b], bins_per_nat) >= kBins - 1) continue;
      const int n = int(size(b));
      sort_into_bins(logits(b), n, bins_per_nat);
      int count = 0;  // the last bin is not summed; compacting the others avoids repeated additions to one address
      for (int j = 0; j < n; ++j) {
        const int32_t bin = bins_[j];
        bins_[count] = bin;
        exponentials_[count] = exponentials_[j];
        count += bin < kBins - 1;
      }
      for (int i = 0; i < count; ++i) mass[bins_[i]] += exponentials_[i];
    }
    int bin = 0;
    double before = 0;
    while (bin < kBins - 1 && before + mass[bin] < goal) before += mass[bin++];
    gather(bin, bins_per_nat);
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
      return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    });
    for (const Candidate& c : candidates_) {
      if (before >= goal) break;
      threshold_ = c.logit;
      last_tie_ = c.id;
      before += fast_exp((c.logit - peak_) * inverse_temperature_);
    }
  }

  // Set candidates_ to the tokens of a bin that are not below the threshold.
  void gather(int bin, float bins_per_nat) {
    candidates_.clear();
    for (int64_t b = 0; b < blocks_; ++b) {
      const bool is_past_bin = bin < kBins - 1 && bin_position(largest_[b], bins_per_nat) >= bin + 1;
      if (largest_[b] < threshold_ || is_past_bin) continue;
      const float* z = logits(b);
      const int n = int(size(b));
      sort_into_bins(z, n, bins_per_nat);
      for (int j = 0; j < n; ++j) {
        if (bins_[j] == bin && z[j] >= threshold_) candidates_.push_back({z[j], b * kBlock + j});
      }
    }
  }

  // Return the first token at which the running sum in vocabulary order exceeds `target`. A token without mass is never
  // chosen. If rounding leads past the end, block, group of kLanes and token fall back to the last one with mass.
  Drawn pick(double target) {
    int64_t block = 0;
    double before = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      if (masses_[b] == 0) continue;
      block = b;
      if (before + masses_[b] > target) break;
      before += masses_[b];
    }
    const float* z = logits(block);
    const int64_t n = size(block);
    exponentiate<true>(z, block);
    std::fill(exponentials_ + n, exponentials_ + (n + kLanes - 1) / kLanes * kLanes, 0.0f);
    const double scale = fast_exp((largest_[block] - peak_) * inverse_temperature_);
    int64_t group = 0;
    for (int64_t g = 0; g < n; g += kLanes) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < kLanes; ++j) sum += exponentials_[g + j];
      if (sum == 0) continue;
      group = g;
      if (before + sum * scale > target) break;
      before += sum * scale;
    }
    int64_t token = group;
    for (int64_t j = group; j < group + kLanes; ++j) {
      if (exponentials_[j] == 0) continue;
      token = j;
      before += exponentials_[j] * scale;
      if (before > target) break;
    }
    const double log_prob = (double(z[token]) - peak_) / settings_.temperature - std::log(total_);
    return {block * kBlock + token, float(log_prob)};
  }

  const int64_t vocab_, blocks_;
  const SampleSettings settings_;
  const float inverse_temperature_;
  const T* row_ = nullptr;
  float peak_ = 0;  // the largest logit of the row
  double total_ = 0;
  // Logits above the threshold are kept, and those equal to it up to this token.
  float threshold_ = 0;
  int64_t last_tie_ = 0;
  std::vector<float> largest_, sums_;  // of each block
  std::vector<double> masses_;
  std::vector<float> maxima_, above_;
  std::vector<Candidate> candidates_;
  alignas(64) float widened_[kBlock] = {};
  alignas(64) float exponentials_[kBlock] = {};
  alignas(64) int32_t bins_[kBlock] = {};
};

}  // namespace brorl
