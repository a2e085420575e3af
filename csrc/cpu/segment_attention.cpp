// A piece of work is one kv head of a few segments that share a prefix. Before all pieces, keys (for the gradient also
// values) are copied to a layout with tokens contiguous, in blocks of kBlock tokens. Every piece has its own sums of
// the prefix's gradients, which are added in order.
#include "cpu/segment_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "common/fast_exp.h"
#include "cpu/segment_stream.h"

namespace brorl {
namespace {

using at::Tensor;

constexpr int64_t kStepKeys = 8 * kBlock;  // keys per step of the online softmax
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// State of the online softmax of up to kBlock queries; scores [rows, kStepKeys] have `width` valid columns.
struct Softmax {
  float largest[kBlock], sum[kBlock];
  alignas(64) float scores[kBlock * kStepKeys];

  // Replace a row's scores by weights; return the factor on the row's earlier weights.
  float add(int64_t r, int64_t width, float scale, bool first) {
    float* const row = scores + r * kStepKeys;
    Wide top = all_wide(kMinusInfinity);
    for (int64_t c = 0; c < width; c += kWide) {
      const Wide x = scale * load_wide(row + c);
      top = larger(x, top);
      store_wide(row + c, x);
    }
    const float before = first ? kMinusInfinity : largest[r], highest = largest_lane(top);
    const float now = before > highest ? before : highest;
    Wide total = {};
    for (int64_t c = 0; c < width; c += kWide) {
      for (int64_t i = 0; i < kWide; ++i) row[c + i] = fast_exp(row[c + i] - now);
      total += load_wide(row + c);
    }
    const float added = sum_lanes(total), shrink = first ? 0.0f : std::exp(before - now);
    sum[r] = first ? added : sum[r] * shrink + added;
    largest[r] = now;
    return shrink;
  }
};

struct Forward {
  Heads query, value, out;
  Transposed keys;
  float* log_sums;
  int64_t heads, kv_heads, d;  // heads: of one kv head
  float scale;

  // Compute queries [q, q + rows) of a segment for one head of the kv head.
  void attend(const Segment& s, int64_t q, int64_t rows, int64_t kv_head, int64_t head) const {
    Softmax softmax;
    const std::vector<Keys> blocks = keys_of(s, q, rows);
    const Rows queries{query.at(s.begin + q, kv_head) + head * d, query.token, 1};
    float* const result = out.at(s.begin + q, kv_head) + head * d;
    for (size_t begin = 0; begin < blocks.size(); begin += kStepKeys / kBlock) {
      const size_t end = std::min(blocks.size(), begin + kStepKeys / kBlock);
      int64_t width = 0;
      for (size_t i = begin; i < end; ++i) {
        const Keys& k = blocks[i];
        float* const scores = softmax.scores + width;
        product(
            queries, rows, keys.block(k.begin, k.length, kv_head, k.block), keys.width(k.length, k.block), scores,
            kStepKeys, false, [&](int64_t, int64_t) { return Range{0, d}; }, [&](int64_t r) { return k.visible(r); });
        for (int64_t r = 0; r < rows; ++r) {
          std::fill(scores + r * kStepKeys + k.visible(r), scores + r * kStepKeys + padded(k.tokens), kMinusInfinity);
        }
        width += padded(k.tokens);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const float shrink = softmax.add(r, width, scale, begin == 0);
        if (begin > 0) std::for_each_n(result + r * out.token, d, [&](float& x) { x *= shrink; });
      }
      width = 0;
      for (size_t i = begin; i < end; ++i) {
        const Keys& k = blocks[i];
        product(
            Rows{softmax.scores + width, kStepKeys, 1}, rows, value.at(k.begin + k.block, kv_head), value.token, result,
            out.token, i > 0, [&](int64_t, int64_t last) { return Range{0, k.visible(last)}; },
            [&](int64_t) { return d; });
        width += padded(k.tokens);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      std::for_each_n(result + r * out.token, d, [inverse_sum = 1 / softmax.sum[r]](float& x) { x *= inverse_sum; });
      log_sums[((s.begin + q + r) * kv_heads + kv_head) * heads + head] = softmax.largest[r] + std::log(softmax.sum[r]);
    }
  }
};

// With the weights P, their sum over keys weighted by dP = gradient . value, and dS = P (dP - sum): the gradients of
// values are P^T gradient, of keys dS^T query, of queries dS key (Dao et al. 2022, appendix B.2).
struct Backward {
  Heads gradient, query, key, value, out, dquery, dkey, dvalue;
  Transposed keys, values;
  const float* log_sums;
  int64_t heads, kv_heads, d;  // heads: of one kv head
  float scale;

  // Compute queries [q, q + rows) of a segment for one head of the kv head; prefix_* [prefix_length, d] receive the
  // gradients of the prefix.
  void attend(
      const Segment& s, int64_t q, int64_t rows, int64_t kv_head, int64_t head, float* prefix_key,
      float* prefix_value) const {
    alignas(64) float weights[kBlock * kBlock], slopes[kBlock * kBlock];
    float dot[kBlock];
    const int64_t row = s.begin + q;
    const float *const up = gradient.at(row, kv_head) + head * d, *const queries = query.at(row, kv_head) + head * d;
    float* const to_query = dquery.at(row, kv_head) + head * d;
    for (int64_t r = 0; r < rows; ++r) {
      float sum = 0;
      const float *const g = up + r * gradient.token, *const o = out.at(row + r, kv_head) + head * d;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < d; ++i) sum += g[i] * o[i];
      dot[r] = sum;
    }
    bool first = true;
    for (const Keys& k : keys_of(s, q, rows)) {
      const auto whole = [&](int64_t, int64_t) { return Range{0, d}; };
      const auto visible = [&](int64_t r) { return k.visible(r); };
      const int64_t ld = keys.width(k.length, k.block);
      product(
          {queries, query.token, 1}, rows, keys.block(k.begin, k.length, kv_head, k.block), ld, weights, kBlock, false,
          whole, visible);
      product(
          {up, gradient.token, 1}, rows, values.block(k.begin, k.length, kv_head, k.block), ld, slopes, kBlock, false,
          whole, visible);
      for (int64_t r = 0; r < rows; ++r) {
        float *const weight = weights + r * kBlock, *const slope = slopes + r * kBlock;
        const float log_sum = log_sums[((row + r) * kv_heads + kv_head) * heads + head];
#pragma omp simd
        for (int64_t c = 0; c < padded(k.visible(r)); ++c) {
          weight[c] = fast_exp(weight[c] * scale - log_sum);
          slope[c] = weight[c] * (slope[c] - dot[r]) * scale;
        }
        std::fill(weight + k.visible(r), weight + padded(k.tokens), 0.0f);
        std::fill(slope + k.visible(r), slope + padded(k.tokens), 0.0f);
      }
      const bool own = k.begin == s.begin;
      float* const to_key = own ? dkey.at(k.begin + k.block, kv_head) : prefix_key + k.block * d;
      float* const to_value = own ? dvalue.at(k.begin + k.block, kv_head) : prefix_value + k.block * d;
      const auto seeing = [&](int64_t c, int64_t) { return Range{k.first_to_see(c), rows}; };
      const auto all = [&](int64_t) { return d; };
      product({weights, 1, kBlock}, k.tokens, up, gradient.token, to_value, own ? dvalue.token : d, true, seeing, all);
      product({slopes, 1, kBlock}, k.tokens, queries, query.token, to_key, own ? dkey.token : d, true, seeing, all);
      product(
          {slopes, kBlock, 1}, rows, key.at(k.begin + k.block, kv_head), key.token, to_query, dquery.token, !first,
          [&](int64_t, int64_t last) { return Range{0, k.visible(last)}; }, all);
      first = false;
    }
  }
};

void check(const Tensor& x, const char* name, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(x.sizes() == sizes, name, " must be ", sizes, ", got ", x.sizes());
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, name, " must be float32, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.is_contiguous(), name, " must be contiguous");
}

// Check segments, which are offsets into memory.
void check_segments(const Tensor& segments, int64_t tokens) {
  TORCH_CHECK_VALUE(segments.dim() == 2 && segments.size(1) == 4, "segments must be [S, 4], got ", segments.sizes());
  TORCH_CHECK_TYPE(segments.scalar_type() == at::kLong, "segments must be int64, got ", segments.scalar_type());
  TORCH_CHECK_VALUE(segments.is_contiguous(), "segments must be contiguous");
  const int64_t* const row = segments.const_data_ptr<int64_t>();
  std::vector<int64_t> lengths(tokens + 1);  // length of the segment without a prefix that starts at each token
  int64_t end = 0;
  for (int64_t i = 0; i < segments.size(0); ++i) {
    const int64_t begin = row[4 * i], length = row[4 * i + 1], prefix = row[4 * i + 2], prefix_length = row[4 * i + 3];
    TORCH_CHECK_INDEX(
        begin == end && length > 0 && length <= tokens - end, "segments[", i, "] must begin at token ", end,
        " and have 1 to ", tokens - end, " tokens, has ", length, " from ", begin);
    TORCH_CHECK_INDEX(
        prefix_length == 0 || (prefix_length > 0 && prefix >= 0 && prefix < begin && lengths[prefix] == prefix_length),
        "segments[", i, "]: tokens ", prefix, " + ", prefix_length, " are not an earlier segment without a prefix");
    if (prefix_length == 0) lengths[begin] = length;
    end += length;
  }
  TORCH_CHECK_INDEX(end == tokens, "segments must cover ", tokens, " tokens, cover ", end);
}

void check_all(const Tensor& qkv, const Tensor& segments) {
  TORCH_CHECK_VALUE(
      qkv.dim() == 4 && qkv.size(1) > 0 && qkv.size(2) > 2 && qkv.size(3) % kWide == 0,
      "qkv must be [T, kv_heads, heads of each + 2, d], d a multiple of ", kWide, ", got ", qkv.sizes());
  check(qkv, "qkv", qkv.sizes());
  check_segments(segments, qkv.size(0));
}

}  // namespace

std::tuple<Tensor, Tensor> segment_attention(const Tensor& qkv, const Tensor& segments, double scale) {
  check_all(qkv, segments);
  const int64_t kv_heads = qkv.size(1), heads = qkv.size(2) - 2, d = qkv.size(3);
  Tensor out = at::empty({qkv.size(0), kv_heads, heads, d}, qkv.options());
  Tensor log_sums = at::empty({qkv.size(0), kv_heads, heads}, qkv.options());
  const Stream stream(segments, kv_heads);
  const Forward forward{
      heads_of(qkv), heads_of(qkv, heads + 1), heads_of(out), Transposed(qkv, heads, stream.segments),
      log_sums.mutable_data_ptr<float>(), heads, kv_heads, d, float(scale)};
  stream.for_pieces([&](int64_t, const Segment& s, int64_t kv_head) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t q = 0; q < s.length; q += kBlock) {
        forward.attend(s, q, std::min(kBlock, s.length - q), kv_head, head);
      }
    }
  });
  return {out, log_sums};
}

Tensor segment_attention_gradient(
    const Tensor& gradient, const Tensor& qkv, const Tensor& out, const Tensor& log_sums, const Tensor& segments,
    double scale) {
  check_all(qkv, segments);
  const int64_t tokens = qkv.size(0), kv_heads = qkv.size(1), heads = qkv.size(2) - 2, d = qkv.size(3);
  check(gradient, "gradient", {tokens, kv_heads, heads, d});
  check(out, "out", {tokens, kv_heads, heads, d});
  check(log_sums, "log_sums", {tokens, kv_heads, heads});
  Tensor dqkv = at::empty(qkv.sizes(), qkv.options());
  const Stream stream(segments, kv_heads);
  const Backward backward{
      heads_of(gradient), heads_of(qkv), heads_of(qkv, heads), heads_of(qkv, heads + 1), heads_of(out),
      heads_of(dqkv), heads_of(dqkv, heads), heads_of(dqkv, heads + 1), Transposed(qkv, heads, stream.segments),
      Transposed(qkv, heads + 1, stream.segments), log_sums.const_data_ptr<float>(), heads, kv_heads, d, float(scale)};
  // Gradients of the prefix's keys, then values, per piece: [2, prefix_length, d].
  std::vector<std::vector<float>> prefix_gradients(stream.runs.size() * kv_heads);
  stream.for_pieces([&](int64_t piece, const Segment& s, int64_t kv_head) {
    std::vector<float>& prefix = prefix_gradients[piece];
    prefix.resize(2 * s.prefix_length * d);
    for (int64_t t = s.begin; t < s.begin + s.length; ++t) {
      std::fill_n(backward.dkey.at(t, kv_head), 2 * d, 0.0f);  // dkey, and dvalue after it
    }
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t q = 0; q < s.length; q += kBlock) {
        backward.attend(
            s, q, std::min(kBlock, s.length - q), kv_head, head, prefix.data(), prefix.data() + s.prefix_length * d);
      }
    }
  });
#pragma omp parallel for num_threads(at::get_num_threads())
  for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
    for (size_t run = 0; run < stream.runs.size(); ++run) {
      const Segment& s = stream.segments[stream.runs[run].first];
      const float* from = prefix_gradients[run * kv_heads + kv_head].data();
      for (const Heads& to : {backward.dkey, backward.dvalue}) {
        for (int64_t t = 0; t < s.prefix_length; ++t, from += d) {
          float* const row = to.at(s.prefix + t, kv_head);
          for (int64_t i = 0; i < d; ++i) row[i] += from[i];
        }
      }
    }
  }
  return dqkv;
}

}  // namespace brorl
