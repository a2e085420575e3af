// A piece of work is one kv head of a few rows of one prompt. It stores their new keys and values. Then their queries
// attend in tiles of up to eight, which read a page of the prompt once. Softmax runs online over blocks of keys
// (Milakov & Gimelshein 2018), with sums in float32.
#include "cpu/decode_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include "common/fast_exp.h"
#include "common/float_lanes.h"

namespace brorl {
namespace {

using at::Tensor;

constexpr int64_t kPage = 16;         // tokens; equals kWide, so one key component of a page is one vector
constexpr int64_t kBlockPages = 8;    // pages per round of the online softmax
constexpr int64_t kBlockKeys = kBlockPages * kPage;
constexpr int kTile = 8;              // queries
constexpr int64_t kMaxHeadSize = 256;
static_assert(kPage == kWide);

struct DecodeShapes {
  int64_t rows, pages, kv_heads, heads, d, width;
};

void check_decode(const at::Tensor& x, const char* name, at::IntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.sizes() == sizes, name, " must be ", sizes, ", got ", x.sizes());
  TORCH_CHECK_TYPE(x.scalar_type() == dtype, name, " must be ", dtype, ", got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.is_contiguous(), name, " must be contiguous");
}

void check_decode_dtype(const at::Tensor& x, const char* name) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16, name, " must be float32 or bfloat16, got ", dtype);
}

// Raise an error that names a tensor of wrong shape or dtype. check_offsets checks the entries of tables and lengths.
DecodeShapes check_decode_step(
    const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
    const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& keys, const at::Tensor& values,
    const at::Tensor& tables, const at::Tensor& lengths, const at::Tensor& prompt_tables,
    const at::Tensor& prompt_lengths, const at::Tensor& prompts, const at::Tensor& out) {
  check_decode_dtype(qkv, "qkv");
  const auto dtype = qkv.scalar_type();
  TORCH_CHECK_VALUE(
      qkv.dim() == 2 && keys.dim() == 4 && keys.size(3) == kPage && values.dim() == 4 && tables.dim() == 2 &&
          prompt_tables.dim() == 2 && prompt_lengths.dim() == 1 && out.dim() == 2,
      "qkv must be [B, (heads + 2 K) d], keys [pages, K, d, 16], values [pages, K, 16, d], tables [B, n], "
      "prompt_tables [S, n], prompt_lengths [S], out [B, heads d]");
  const int64_t rows = qkv.size(0), pages = keys.size(0), kv_heads = keys.size(1), d = keys.size(2);
  const int64_t width = values.size(3), heads = d ? out.size(1) / d : 0;
  TORCH_CHECK_VALUE(
      d > 0 && d % 2 == 0 && d <= width && width % kPage == 0 && width <= kMaxHeadSize, "a head has ", d, " in ", width,
      " places: an even size in a multiple of 16 up to ", kMaxHeadSize, " is needed");
  TORCH_CHECK_VALUE(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, heads, " heads do not share ", kv_heads);
  check_decode(qkv, "qkv", {rows, (heads + 2 * kv_heads) * d}, dtype);
  check_decode(cos, "cos", {rows, d / 2}, at::kFloat);
  check_decode(sin, "sin", {rows, d / 2}, at::kFloat);
  check_decode(keys, "keys", {pages, kv_heads, d, kPage}, dtype);
  check_decode(values, "values", {pages, kv_heads, kPage, width}, dtype);
  check_decode(tables, "tables", {rows, tables.size(1)}, at::kInt);
  check_decode(lengths, "lengths", {rows}, at::kLong);
  check_decode(prompt_tables, "prompt_tables", {prompt_lengths.size(0), prompt_tables.size(1)}, at::kInt);
  check_decode(prompt_lengths, "prompt_lengths", prompt_lengths.sizes(), at::kLong);
  check_decode(prompts, "prompts", {rows}, at::kLong);
  check_decode(out, "out", {rows, heads * d}, dtype);
  if (q_norm) check_decode(*q_norm, "q_norm", {d}, at::kFloat);
  if (k_norm) check_decode(*k_norm, "k_norm", {d}, at::kFloat);
  return {rows, pages, kv_heads, heads, d, width};
}

// scores[r][16 p + i] = q[r] . key i of page p.
template <int R, int P, typename T>
void page_scores(const float* q, int64_t d, const T* const* pages, float* scores) {
  Wide sum[R][P] = {};
  for (int64_t k = 0; k < d; ++k) {
    Wide key[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) key[p] = load_wide(pages[p] + k * kPage);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sum[r][p] += q[r * d + k] * key[p];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) store_wide(scores + r * kBlockKeys + p * kPage, sum[r][p]);
  }
}

// total[r][column .. column + 16 C) += sum over `count` keys of weights[r][key] value[key][column ..].
template <int R, int C, typename T>
void page_values(
    const float* weights, const T* const* pages, int64_t count, int64_t column, int64_t width, float* total) {
  Wide sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = load_wide(total + r * kMaxHeadSize + column + c * kWide);
  }
  for (int64_t key = 0; key < count; ++key) {
    const T* const value = pages[key / kPage] + key % kPage * width + column;
    Wide x[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) x[c] = load_wide(value + c * kWide);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] += weights[r * kBlockKeys + key] * x[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store_wide(total + r * kMaxHeadSize + column + c * kWide, sum[r][c]);
  }
}

// page_scores of all pages and page_values of all columns, with as many rows and columns at once as fit the registers.
template <int R, typename T>
void all_scores(const float* q, int64_t d, const T* const* pages, int64_t count, float* scores) {
  if constexpr (R > kHeld) {
    constexpr int kHalf = R / 2;
    all_scores<kHalf>(q, d, pages, count, scores);
    all_scores<R - kHalf>(q + kHalf * d, d, pages, count, scores + kHalf * kBlockKeys);
  } else {
    constexpr int kAtOnce = std::min(kHeld / R, 4);
    int64_t p = 0;
    for (; p + kAtOnce <= count; p += kAtOnce) page_scores<R, kAtOnce>(q, d, pages + p, scores + p * kPage);
    for (; p < count; ++p) page_scores<R, 1>(q, d, pages + p, scores + p * kPage);
  }
}

template <int R, typename T>
void all_values(const float* weights, const T* const* pages, int64_t count, int64_t width, float* total) {
  if constexpr (R > kHeld) {
    constexpr int kHalf = R / 2;
    all_values<kHalf>(weights, pages, count, width, total);
    all_values<R - kHalf>(weights + kHalf * kBlockKeys, pages, count, width, total + kHalf * kMaxHeadSize);
  } else {
    constexpr int kAtOnce = std::min(kHeld / R, 4);
    int64_t column = 0;
    for (; column + kAtOnce * kWide <= width; column += kAtOnce * kWide) {
      page_values<R, kAtOnce>(weights, pages, count, column, width, total);
    }
    for (; column < width; column += kWide) page_values<R, 1>(weights, pages, count, column, width, total);
  }
}

// The softmax of up to kTile queries so far.
struct Tile {
  float largest[kTile], sum[kTile];
  alignas(64) float total[kTile * kMaxHeadSize];
  alignas(64) float scores[kTile * kBlockKeys];
};

// Queries first .. first + R of the tile attend to `count` keys whose pages are keys[] and values[].
template <int R, typename T>
void attend_block(
    Tile& tile, int first, const float* q, int64_t d, const T* const* keys, const T* const* values, int64_t count,
    int64_t width) {
  const int64_t pages = (count + kPage - 1) / kPage;
  float* const scores = tile.scores + first * kBlockKeys;
  all_scores<R>(q, d, keys, pages, scores);
  for (int r = 0; r < R; ++r) {
    float* const s = scores + r * kBlockKeys;
    for (int64_t j = count; j < pages * kPage; ++j) s[j] = -std::numeric_limits<float>::infinity();
    Wide top = all_wide(tile.largest[first + r]);  // lane by lane: compilers do not vectorise a float maximum
    for (int64_t j = 0; j < pages * kPage; j += kWide) top = larger(load_wide(s + j), top);
    const float largest = largest_lane(top);
    const float shrink = std::exp(tile.largest[first + r] - largest);
    float* const total = tile.total + (first + r) * kMaxHeadSize;
    for (int64_t i = 0; i < width; ++i) total[i] *= shrink;
    Wide sum = {};
    for (int64_t j = 0; j < pages * kPage; j += kWide) {
      for (int64_t i = 0; i < kWide; ++i) s[j + i] = fast_exp(s[j + i] - largest);
      sum += load_wide(s + j);
    }
    tile.sum[first + r] = tile.sum[first + r] * shrink + sum_lanes(sum);
    tile.largest[first + r] = largest;
  }
  all_values<R>(scores, values, count, width, tile.total + first * kMaxHeadSize);
}

template <typename T>
using Attend = void (*)(Tile&, int, const float*, int64_t, const T* const*, const T* const*, int64_t, int64_t);

template <typename T>
struct Step {
  const T* qkv;
  const float *q_norm, *k_norm, *cos, *sin;
  T *keys, *values;
  const int32_t *tables, *prompt_tables;
  const int64_t *lengths, *prompt_lengths, *prompts;
  T* out;
  int64_t rows, heads, kv_heads, d, width, table_size, prompt_table_size;
  float scale, eps;

  int64_t group() const { return heads / kv_heads; }  // query heads per kv head
  int64_t stride() const { return (heads + 2 * kv_heads) * d; }  // of the rows of qkv
  T* key_page(int64_t page, int64_t head) const { return keys + (page * kv_heads + head) * d * kPage; }
  T* value_page(int64_t page, int64_t head) const { return values + (page * kv_heads + head) * kPage * width; }

  // One head x [d] of a row, normalized if there are weights, and rotated.
  void rotated(const T* x, const float* norm, int64_t row, float* result) const {
    float square = 0;
    for (int64_t i = 0; i < d; ++i) result[i] = float(x[i]);
    if (norm) {
      for (int64_t i = 0; i < d; ++i) square += result[i] * result[i];
      const float factor = 1 / std::sqrt(square / float(d) + eps);
      for (int64_t i = 0; i < d; ++i) result[i] *= factor * norm[i];
    }
    const int64_t half = d / 2;
    const float *const c = cos + row * half, *const s = sin + row * half;
    for (int64_t i = 0; i < half; ++i) {
      const float first = result[i], second = result[half + i];
      result[i] = first * c[i] - second * s[i];
      result[half + i] = second * c[i] + first * s[i];
    }
  }

  // Store a row's new key and value of one kv head.
  void store(int64_t row, int64_t head) const {
    const int64_t position = lengths[row] - 1, slot = position % kPage;
    const int64_t page = tables[row * table_size + position / kPage];
    float key[kMaxHeadSize];
    rotated(qkv + row * stride() + (heads + head) * d, k_norm, row, key);
    T* const to = key_page(page, head) + slot;
    for (int64_t i = 0; i < d; ++i) to[i * kPage] = T(key[i]);
    const T* const value = qkv + row * stride() + (heads + kv_heads + head) * d;
    std::copy(value, value + d, value_page(page, head) + slot * width);
  }

  // Attend to the keys of a table of pages, block by block.
  void over_pages(
      Tile& tile, int first, int count, const float* q, int64_t head, const int32_t* table, int64_t length) const {
    static constexpr Attend<T> attend[kTile] = {
        attend_block<1, T>, attend_block<2, T>, attend_block<3, T>, attend_block<4, T>,
        attend_block<5, T>, attend_block<6, T>, attend_block<7, T>, attend_block<8, T>};
    for (int64_t begin = 0; begin < length; begin += kBlockKeys) {
      const int64_t size = std::min(kBlockKeys, length - begin);
      const T *key[kBlockPages], *value[kBlockPages];
      for (int64_t p = 0; p < (size + kPage - 1) / kPage; ++p) {
        const int64_t page = table[begin / kPage + p];
        key[p] = key_page(page, head);
        value[p] = value_page(page, head);
      }
      attend[count - 1](tile, first, q, d, key, value, size, width);
    }
  }

  // Compute queries begin .. begin + count of the rows from `row` on: query i is head i % group of row i / group.
  void attend_tile(int64_t row, int64_t head, int64_t begin, int count) const {
    Tile tile;
    alignas(64) float q[kTile * kMaxHeadSize];
    const int64_t g = group();
    for (int r = 0; r < count; ++r) {
      const int64_t b = row + (begin + r) / g, h = head * g + (begin + r) % g;
      rotated(qkv + b * stride() + h * d, q_norm, b, q + r * d);
      for (int64_t i = 0; i < d; ++i) q[r * d + i] *= scale;
      tile.largest[r] = -std::numeric_limits<float>::infinity();
      tile.sum[r] = 0;
      std::fill_n(tile.total + r * kMaxHeadSize, width, 0.0f);
    }
    const int64_t prompt = prompts[row];
    over_pages(tile, 0, count, q, head, prompt_tables + prompt * prompt_table_size, prompt_lengths[prompt]);
    for (int r = 0; r < count;) {  // the queries of one row share its own pages
      const int64_t sibling = (begin + r) / g, b = row + sibling;
      const int row_queries = int(std::min<int64_t>(count - r, (sibling + 1) * g - begin - r));
      over_pages(tile, r, row_queries, q + r * d, head, tables + b * table_size, lengths[b]);
      r += row_queries;
    }
    for (int r = 0; r < count; ++r) {
      const int64_t b = row + (begin + r) / g, h = head * g + (begin + r) % g;
      const float inverse_sum = 1 / tile.sum[r];
      for (int64_t i = 0; i < d; ++i) out[(b * heads + h) * d + i] = T(tile.total[r * kMaxHeadSize + i] * inverse_sum);
    }
  }

  void run() const {
    struct Work {
      int64_t row, head, siblings;
    };
    const int64_t rows_at_once = std::max<int64_t>(1, kTile / group());
    std::vector<Work> work;
    for (int64_t row = 0; row < rows;) {
      int64_t end = row + 1;
      while (end < rows && prompts[end] == prompts[row]) ++end;
      for (int64_t head = 0; head < kv_heads; ++head) {
        for (int64_t b = row; b < end; b += rows_at_once) work.push_back({b, head, std::min(rows_at_once, end - b)});
      }
      row = end;
    }
#pragma omp parallel for schedule(dynamic, 4) num_threads(at::get_num_threads())
    for (size_t i = 0; i < work.size(); ++i) {
      const Work& w = work[i];
      // Store keys right before they are read, because a key touches as many cache lines as it has components.
      for (int64_t b = w.row; b < w.row + w.siblings; ++b) store(b, w.head);
      for (int64_t begin = 0; begin < w.siblings * group(); begin += kTile) {
        attend_tile(w.row, w.head, begin, int(std::min<int64_t>(kTile, w.siblings * group() - begin)));
      }
    }
  }
};

// Check pages and prompts, which are offsets into memory.
void check_offsets(
    const Tensor& tables, const Tensor& lengths, const Tensor& prompt_tables, const Tensor& prompt_lengths,
    const Tensor& prompts, int64_t pages) {
  const auto check_table = [&](const Tensor& table, const Tensor& table_lengths, int64_t row, const char* name) {
    const int64_t length = table_lengths.const_data_ptr<int64_t>()[row], used = (length + kPage - 1) / kPage;
    TORCH_CHECK_VALUE(
        length >= 0 && used <= table.size(1), name, " of row ", row, " has no room for ", length, " tokens");
    const int32_t* const entry = table.const_data_ptr<int32_t>() + row * table.size(1);
    for (int64_t p = 0; p < used; ++p) {
      TORCH_CHECK_INDEX(entry[p] >= 0 && entry[p] < pages, name, "[", row, ", ", p, "] is ", entry[p], " of ", pages);
    }
  };
  for (int64_t s = 0; s < prompt_lengths.size(0); ++s) check_table(prompt_tables, prompt_lengths, s, "prompt_tables");
  const int64_t* const prompt = prompts.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    TORCH_CHECK_VALUE(lengths.const_data_ptr<int64_t>()[b] > 0, "lengths count the new token, lengths[", b, "] is 0");
    check_table(tables, lengths, b, "tables");
    TORCH_CHECK_INDEX(
        prompt[b] >= 0 && prompt[b] < prompt_lengths.size(0), "prompts[", b, "] is ", prompt[b], " of ",
        prompt_lengths.size(0));
  }
}

template <typename T>
void norm_rows(const Tensor& x, const Tensor& delta, const Tensor& weight, double eps, const Tensor& out) {
  const int64_t rows = x.size(0), width = x.size(1);
  T *const values = x.mutable_data_ptr<T>(), *const result = out.mutable_data_ptr<T>();
  const T *const added = delta.defined() ? delta.const_data_ptr<T>() : nullptr, *const w = weight.const_data_ptr<T>();
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads())
  for (int64_t b = 0; b < rows; ++b) {
    T *const row = values + b * width, *const to = result + b * width;
    if (added) {
      for (int64_t i = 0; i < width; ++i) row[i] = T(float(row[i]) + float(added[b * width + i]));
    }
    float lanes[kWide] = {}, square = 0;
    int64_t i = 0;
    for (; i + kWide <= width; i += kWide) {
      for (int64_t j = 0; j < kWide; ++j) lanes[j] += float(row[i + j]) * float(row[i + j]);
    }
    for (; i < width; ++i) square += float(row[i]) * float(row[i]);
    for (int64_t j = 0; j < kWide; ++j) square += lanes[j];
    const float factor = 1 / std::sqrt(square / float(width) + float(eps));
    for (i = 0; i < width; ++i) to[i] = T(float(row[i]) * factor * float(w[i]));
  }
}

}  // namespace

void decode_attention_(
    const Tensor& qkv, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps,
    const Tensor& cos, const Tensor& sin, const Tensor& keys, const Tensor& values, const Tensor& tables,
    const Tensor& lengths, const Tensor& prompt_tables, const Tensor& prompt_lengths, const Tensor& prompts,
    double scale, const Tensor& out) {
  const DecodeShapes s = check_decode_step(
      qkv, q_norm, k_norm, cos, sin, keys, values, tables, lengths, prompt_tables, prompt_lengths, prompts, out);
  check_offsets(tables, lengths, prompt_tables, prompt_lengths, prompts, s.pages);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    Step<T>{
        qkv.const_data_ptr<T>(), q_norm ? q_norm->const_data_ptr<float>() : nullptr,
        k_norm ? k_norm->const_data_ptr<float>() : nullptr, cos.const_data_ptr<float>(), sin.const_data_ptr<float>(),
        keys.mutable_data_ptr<T>(), values.mutable_data_ptr<T>(), tables.const_data_ptr<int32_t>(),
        prompt_tables.const_data_ptr<int32_t>(), lengths.const_data_ptr<int64_t>(),
        prompt_lengths.const_data_ptr<int64_t>(), prompts.const_data_ptr<int64_t>(), out.mutable_data_ptr<T>(),
        s.rows, s.heads, s.kv_heads, s.d, s.width, tables.size(1), prompt_tables.size(1), float(scale), float(eps)}
        .run();
  };
  qkv.scalar_type() == at::kFloat ? run(0.0f) : run(c10::BFloat16(0));
}

void add_rms_norm_(
    const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight, double eps, const Tensor& out) {
  check_decode_dtype(x, "x");
  const auto dtype = x.scalar_type();
  TORCH_CHECK_VALUE(x.dim() == 2, "x must be [B, H], got ", x.sizes());
  check_decode(x, "x", x.sizes(), dtype);
  if (delta) check_decode(*delta, "delta", x.sizes(), dtype);
  check_decode(weight, "weight", {x.size(1)}, dtype);
  check_decode(out, "out", x.sizes(), dtype);
  const Tensor added = delta ? *delta : Tensor();
  dtype == at::kFloat ? norm_rows<float>(x, added, weight, eps, out)
                      : norm_rows<c10::BFloat16>(x, added, weight, eps, out);
}

}  // namespace brorl
