// Partition of a packed stream for segment_attention: pieces of work, blocks of queries and keys, and tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "cpu/float_tile.h"
#include "common/transpose.h"

namespace brorl {

constexpr int64_t kBlock = 64;    // queries or keys
constexpr int64_t kTokens = 512;  // tokens of segments per piece, approximately

inline int64_t padded(int64_t tokens) { return (tokens + kWide - 1) / kWide * kWide; }

struct Segment {
  int64_t begin, length, prefix, prefix_length;
};

// Segments first .. end of the list, which share a prefix.
struct Run {
  int64_t first, end;
};

// A view of some heads of each kv head, with d contiguous.
struct Heads {
  float* data;
  int64_t token, kv_head;  // strides in elements

  float* at(int64_t t, int64_t h) const { return data + t * token + h * kv_head; }
};

// The view starts at head `first` of each kv head of x [T, kv_heads, ..., d].
inline Heads heads_of(const at::Tensor& x, int64_t first = 0) {
  return {const_cast<float*>(x.const_data_ptr<float>()) + first * x.size(x.dim() - 1), x.stride(0), x.stride(1)};
}

// Keys or values with tokens contiguous: blocks [d, kBlock] per segment and kv head; the last block is padded(..) wide.
struct Transposed {
  // Copies head `head` of each kv head of qkv [T, kv_heads, heads + 2, d].
  Transposed(const at::Tensor& qkv, int64_t head, const std::vector<Segment>& segments)
      : from(heads_of(qkv, head)), d(qkv.size(3)), kv_heads(qkv.size(1)), at_token(qkv.size(0)) {
    int64_t total = 0;
    for (const Segment& s : segments) {
      at_token[s.begin] = total;
      total += padded(s.length);
    }
    memory = at::empty({total * d * kv_heads}, qkv.options());
    float* const to = memory.mutable_data_ptr<float>();
#pragma omp parallel for schedule(dynamic) num_threads(at::get_num_threads())
    for (size_t i = 0; i < segments.size(); ++i) {
      const Segment& s = segments[i];
      for (int64_t h = 0; h < kv_heads; ++h) {
        for (int64_t b = 0; b < s.length; b += kBlock) {
          transpose_floats(
              from.at(s.begin + b, h), from.token, std::min(kBlock, s.length - b), d,
              to + offset(s.begin, s.length, h, b), width(s.length, b));
        }
      }
    }
  }

  // Return the block that starts at token `block` of the segment with the given start and length.
  const float* block(int64_t begin, int64_t length, int64_t kv_head, int64_t block) const {
    return memory.const_data_ptr<float>() + offset(begin, length, kv_head, block);
  }
  int64_t width(int64_t length, int64_t block) const { return padded(std::min(kBlock, length - block)); }

 private:
  int64_t offset(int64_t begin, int64_t length, int64_t kv_head, int64_t block) const {
    return (at_token[begin] * kv_heads + padded(length) * kv_head + block) * d;
  }

  Heads from;
  int64_t d, kv_heads;
  std::vector<int64_t> at_token;  // padded tokens before the segment that starts at each token
  at::Tensor memory;
};

// A block of keys and the queries' view of it.
struct Keys {
  int64_t begin, length, block, tokens;  // of the segment; first key in it; number of keys
  int64_t diagonal;                      // query r attends to keys up to diagonal + r; kAll: to all

  static constexpr int64_t kAll = int64_t(1) << 40;
  int64_t visible(int64_t r) const { return std::min(tokens, diagonal + r + 1); }
  int64_t first_to_see(int64_t key) const { return std::max<int64_t>(0, key - diagonal); }
};

// Return the blocks of keys for queries [q, q + rows) of a segment.
inline std::vector<Keys> keys_of(const Segment& s, int64_t q, int64_t rows) {
  std::vector<Keys> blocks;
  for (int64_t b = 0; b < s.prefix_length; b += kBlock) {
    blocks.push_back({s.prefix, s.prefix_length, b, std::min(kBlock, s.prefix_length - b), Keys::kAll});
  }
  for (int64_t b = 0; b < q + rows; b += kBlock) {
    blocks.push_back({s.begin, s.length, b, std::min(kBlock, q + rows - b), b < q ? Keys::kAll : q - b});
  }
  return blocks;
}

struct Range {
  int64_t from, to;
};

// out [rows, ...] = or += a b in tiles. Rows from `first` to `last` need the elements depth(first, last) of k and
// columns(last) columns.
template <typename Depth, typename Columns>
void product(
    Rows a, int64_t rows, const float* b, int64_t ld_b, float* out, int64_t ld, bool accumulate, Depth depth,
    Columns columns) {
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, rows - r), last = r + count - 1;
    const Range k = depth(r, last);
    const int64_t wides = padded(columns(last)) / kWide;
    for (int64_t w = 0; w < wides; w += kTileWides) {
      multiply(
          a.from(r, k.from), count, b + k.from * ld_b + w * kWide, ld_b, std::min<int64_t>(kTileWides, wides - w),
          k.to - k.from, out + r * ld + w * kWide, ld, accumulate);
    }
  }
}

// The segments and their division into pieces of work.
struct Stream {
  Stream(const at::Tensor& rows, int64_t kv_heads) : kv_heads(kv_heads) {
    const int64_t* row = rows.const_data_ptr<int64_t>();
    int64_t tokens = 0;
    for (int64_t i = 0; i < rows.size(0); ++i, row += 4) {
      segments.push_back({row[0], row[1], row[2], row[3]});
      const Segment &s = segments.back(), &before = segments[i ? i - 1 : 0];
      if (i && before.prefix == s.prefix && before.prefix_length == s.prefix_length && tokens + s.length <= kTokens) {
        runs.back().end = i + 1;
        tokens += s.length;
      } else {
        runs.push_back({i, i + 1});
        tokens = s.length;
      }
    }
  }

  // Call each(piece, segment, kv head); one thread processes the segments of a piece in order.
  template <typename Each>
  void for_pieces(Each each) const {
#pragma omp parallel for schedule(dynamic) num_threads(at::get_num_threads())
    for (int64_t piece = 0; piece < int64_t(runs.size()) * kv_heads; ++piece) {
      const Run& run = runs[piece / kv_heads];
      for (int64_t i = run.first; i < run.end; ++i) each(piece, segments[i], piece % kv_heads);
    }
  }

  int64_t kv_heads;
  std::vector<Segment> segments;
  std::vector<Run> runs;
};

}  // namespace brorl
