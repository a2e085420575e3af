// A piece of work is one kv head of a few segments that share a prefix. Keys (for the gradient also values) are laid out
// beforehand with their tokens contiguous, in blocks of kBlock tokens. What the pieces add to a prefix's gradients is
// kept apart and summed in their order.
#include "segment_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "fast_exp.h"
#include "segment_stream.h"

namespace brorl {
namespace {

using at::Tensor;

constexpr int64_t kKeys = 8 * kBlock;  // per round of the online softmax
constexpr float kNone = -std::numeric_limits<float>::infinity();

// The softmax of up to kBlock queries so far: of scores [rows, kKeys], their first `width` columns.
struct Softmax {
  float largest[kBlock], sum[kBlock];
  alignas(64) float scores[kBlock * kKeys];

  // A row's scores become weights; returns by how much the row's earlier weights shrink.
  float add(int64_t r, int64_t width, float scale, bool first) {
    float* const row = scores + r * kKeys;
    Wide top = Wide{} + kNone;
    for (int64_t c = 0; c < width; c += kWide) {
      const Wide x = load_wide(row + c) * scale;
      top = x > top ? x : top;
      store_wide(row + c, x);
    }
    const float before = first ? kNone : largest[r], found = largest_lane(top), now = before > found ? before : found;
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
  Turned keys;
  float* log_sums;
  int64_t heads, d;
  float scale;

  // Queries [q, q + rows) of a segment.
  void attend(const Segment& s, int64_t q, int64_t rows, int64_t head, int64_t kv_head) const {
    Softmax softmax;
    const std::vector<Keys> blocks = keys_of(s, q, rows);
    const Rows queries{query.at(s.begin + q, head), query.token, 1};
    float* const result = out.at(s.begin + q, head);
    for (size_t begin = 0; begin < blocks.size(); begin += kKeys / kBlock) {
      const size_t end = std::min(blocks.size(), begin + kKeys / kBlock);
      int64_t width = 0;
      for (size_t i = begin; i < end; ++i) {
        const Keys& k = blocks[i];
        float* const scores = softmax.scores + width;
        product(
            queries, rows, keys.block(k.begin, k.length, kv_head, k.block), keys.width(k.length, k.block), scores,
            kKeys, false, [&](int64_t, int64_t) { return Range{0, d}; }, [&](int64_t r) { return k.seen(r); });
        for (int64_t r = 0; r < rows; ++r) {
          std::fill(scores + r * kKeys + k.seen(r), scores + r * kKeys + padded(k.tokens), kNone);
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
            Rows{softmax.scores + width, kKeys, 1}, rows, value.at(k.begin + k.block, kv_head), value.token, result,
            out.token, i > 0, [&](int64_t, int64_t last) { return Range{0, k.seen(last)}; },
            [&](int64_t) { return d; });
        width += padded(k.tokens);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      std::for_each_n(result + r * out.token, d, [share = 1 / softmax.sum[r]](float& x) { x *= share; });
      log_sums[(s.begin + q + r) * heads + head] = softmax.largest[r] + std::log(softmax.sum[r]);
    }
  }
};

// With the weights P, their sum over keys weighted by dP = gradient . value, and dS = P (dP - sum): the gradients of
// values are P^T gradient, of keys dS^T query, of queries dS key (Dao et al. 2022, appendix B.2).
struct Backward {
  Heads gradient, query, key, value, out, of_query, of_key, of_value;
  Turned keys, values;
  const float* log_sums;
  int64_t heads, d;
  float scale;

  // Queries [q, q + rows) of a segment; prefix_* [prefix_length, d] take what is the prefix's.
  void attend(
      const Segment& s, int64_t q, int64_t rows, int64_t head, int64_t kv_head, float* prefix_key,
      float* prefix_value) const {
    alignas(64) float weights[kBlock * kBlock], slopes[kBlock * kBlock];
    float dot[kBlock];
    const int64_t at = s.begin + q;
    const float* const up = gradient.at(at, head);
    for (int64_t r = 0; r < rows; ++r) {
      float sum = 0;
      const float *const g = up + r * gradient.token, *const o = out.at(at + r, head);
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < d; ++i) sum += g[i] * o[i];
      dot[r] = sum;
    }
    bool first = true;
    for (const Keys& k : keys_of(s, q, rows)) {
      const auto whole = [&](int64_t, int64_t) { return Range{0, d}; };
      const auto seen = [&](int64_t r) { return k.seen(r); };
      const int64_t ld = keys.width(k.length, k.block);
      product(
          {query.at(at, head), query.token, 1}, rows, keys.block(k.begin, k.length, kv_head, k.block), ld, weights,
          kBlock, false, whole, seen);
      product(
          {up, gradient.token, 1}, rows, values.block(k.begin, k.length, kv_head, k.block), ld, slopes, kBlock, false,
          whole, seen);
      for (int64_t r = 0; r < rows; ++r) {
        float *const weight = weights + r * kBlock, *const slope = slopes + r * kBlock;
        const float log_sum = log_sums[(at + r) * heads + head];
#pragma omp simd
        for (int64_t c = 0; c < padded(k.seen(r)); ++c) {
          weight[c] = fast_exp(weight[c] * scale - log_sum);
          slope[c] = weight[c] * (slope[c] - dot[r]) * scale;
        }
        std::fill(weight + k.seen(r), weight + padded(k.tokens), 0.0f);
        std::fill(slope + k.seen(r), slope + padded(k.tokens), 0.0f);
      }
      const bool own = k.begin == s.begin;
      float* const to_key = own ? of_key.at(k.begin + k.block, kv_head) : prefix_key + k.block * d;
      float* const to_value = own ? of_value.at(k.begin + k.block, kv_head) : prefix_value + k.block * d;
      const auto seeing = [&](int64_t c, int64_t) { return Range{k.first_to_see(c), rows}; };
      const auto wide = [&](int64_t) { return d; };
      product({weights, 1, kBlock}, k.tokens, up, gradient.token, to_value, own ? of_value.token : d, true, seeing, wide);
      product(
          {slopes, 1, kBlock}, k.tokens, query.at(at, head), query.token, to_key, own ? of_key.token : d, true, seeing,
          wide);
      product(
          {slopes, kBlock, 1}, rows, key.at(k.begin + k.block, kv_head), key.token, of_query.at(at, head),
          of_query.token, !first, [&](int64_t, int64_t last) { return Range{0, k.seen(last)}; }, wide);
      first = false;
    }
  }
};

void check(const Tensor& x, const char* name, const Tensor& like, int64_t heads) {
  TORCH_CHECK_VALUE(
      x.dim() == 3 && x.size(0) == like.size(0) && x.size(1) == heads && x.size(2) == like.size(2), name, " must be [",
      like.size(0), ", ", heads, ", ", like.size(2), "], got ", x.sizes());
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, name, " must be float32, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.numel() == 0 || x.stride(2) == 1, name, "'s last dimension must be contiguous");
}

// Segments are places in memory, so a wrong one must not pass.
void check_segments(const Tensor& segments, int64_t tokens) {
  TORCH_CHECK_VALUE(segments.dim() == 2 && segments.size(1) == 4, "segments must be [S, 4], got ", segments.sizes());
  TORCH_CHECK_TYPE(segments.scalar_type() == at::kLong, "segments must be int64, got ", segments.scalar_type());
  TORCH_CHECK_VALUE(segments.is_contiguous(), "segments must be contiguous");
  const int64_t* const row = segments.const_data_ptr<int64_t>();
  std::vector<int64_t> alone(tokens + 1);  // the length of the segment without a prefix that begins there
  int64_t end = 0;
  for (int64_t i = 0; i < segments.size(0); ++i) {
    const int64_t begin = row[4 * i], length = row[4 * i + 1], prefix = row[4 * i + 2], of_prefix = row[4 * i + 3];
    TORCH_CHECK_INDEX(
        begin == end && length > 0 && length <= tokens - end, "segments[", i, "] must begin at token ", end,
        " and have 1 to ", tokens - end, " tokens, has ", length, " from ", begin);
    TORCH_CHECK_INDEX(
        of_prefix == 0 || (of_prefix > 0 && prefix >= 0 && prefix < begin && alone[prefix] == of_prefix), "segments[", i,
        "]: tokens ", prefix, " + ", of_prefix, " are not an earlier segment without a prefix");
    if (of_prefix == 0) alone[begin] = length;
    end += length;
  }
  TORCH_CHECK_INDEX(end == tokens, "segments must cover ", tokens, " tokens, cover ", end);
}

void check_all(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& segments) {
  TORCH_CHECK_VALUE(
      query.dim() == 3 && key.dim() == 3 && key.size(1) > 0 && query.size(1) % key.size(1) == 0 &&
          query.size(2) % kWide == 0,
      "query must be [T, heads, d], d a multiple of ", kWide, ", and key's heads divide its heads, got ", query.sizes(),
      " and ", key.sizes());
  check(query, "query", query, query.size(1));
  check(key, "key", query, key.size(1));
  check(value, "value", query, key.size(1));
  check_segments(segments, query.size(0));
}

}  // namespace

std::tuple<Tensor, Tensor> segment_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& segments, double scale) {
  check_all(query, key, value, segments);
  const int64_t heads = query.size(1), group = heads / key.size(1);
  Tensor out = at::empty(query.sizes(), query.options()), log_sums = at::empty({query.size(0), heads}, query.options());
  const Stream stream(segments, key.size(1));
  const Forward forward{
      heads_of(query), heads_of(value), heads_of(out), Turned(key, stream.segments), log_sums.mutable_data_ptr<float>(),
      heads, query.size(2), float(scale)};
  stream.for_pieces([&](int64_t, const Segment& s, int64_t kv_head) {
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t q = 0; q < s.length; q += kBlock) {
        forward.attend(s, q, std::min(kBlock, s.length - q), head, kv_head);
      }
    }
  });
  return {out, log_sums};
}

std::tuple<Tensor, Tensor, Tensor> segment_attention_gradient(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& log_sums, const Tensor& segments, double scale) {
  check_all(query, key, value, segments);
  check(gradient, "gradient", query, query.size(1));
  check(out, "out", query, query.size(1));
  const int64_t heads = query.size(1), kv_heads = key.size(1), group = heads / kv_heads, d = query.size(2);
  TORCH_CHECK_VALUE(
      log_sums.dim() == 2 && log_sums.size(0) == query.size(0) && log_sums.size(1) == heads && log_sums.is_contiguous(),
      "log_sums must be [T, heads] and contiguous, got ", log_sums.sizes());
  TORCH_CHECK_TYPE(log_sums.scalar_type() == at::kFloat, "log_sums must be float32, got ", log_sums.scalar_type());
  Tensor of_query = at::empty(query.sizes(), query.options());
  Tensor of_key = at::zeros(key.sizes(), key.options()), of_value = at::zeros(key.sizes(), key.options());
  const Stream stream(segments, kv_heads);
  const Backward backward{
      heads_of(gradient), heads_of(query), heads_of(key), heads_of(value), heads_of(out), heads_of(of_query),
      heads_of(of_key), heads_of(of_value), Turned(key, stream.segments), Turned(value, stream.segments),
      log_sums.const_data_ptr<float>(), heads, d, float(scale)};
  // Of each piece: what it adds to the prefix's keys, then to its values, [2, prefix_length, d].
  std::vector<std::vector<float>> added(stream.runs.size() * kv_heads);
  stream.for_pieces([&](int64_t piece, const Segment& s, int64_t kv_head) {
    std::vector<float>& prefix = added[piece];
    prefix.resize(2 * s.prefix_length * d);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t q = 0; q < s.length; q += kBlock) {
        backward.attend(
            s, q, std::min(kBlock, s.length - q), head, kv_head, prefix.data(), prefix.data() + s.prefix_length * d);
      }
    }
  });
#pragma omp parallel for num_threads(at::get_num_threads())
  for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
    for (size_t run = 0; run < stream.runs.size(); ++run) {
      const Segment& s = stream.segments[stream.runs[run].first];
      const float* from = added[run * kv_heads + kv_head].data();
      for (const Heads& to : {backward.of_key, backward.of_value}) {
        for (int64_t t = 0; t < s.prefix_length; ++t, from += d) {
          float* const row = to.at(s.prefix + t, kv_head);
          for (int64_t i = 0; i < d; ++i) row[i] += from[i];
        }
      }
    }
  }
  return {of_query, of_key, of_value};
}

}  // namespace brorl
