// One decoding step's attention over pages in place: nothing is gathered, nothing widened in memory.
//
// Keys and values are cut into chunks of 32 pages. A block of threads takes one chunk and one kv head: of a prompt for as
// many rows as share it and have 16 or 32 query heads together, so that its pages are read once for all of them; of a
// row's own tokens for its query heads. Softmax runs online over a chunk (Milakov & Gimelshein 2018), and the chunks of a
// query are added up at the end by their largest scores and sums (Dao et al. 2023, flash-decoding). How much there is to
// do follows from the tables' sizes, so that the host need not wait for lengths: blocks beyond the end of a text say so
// and leave. Heads of bfloat16 in multiples of 16 are multiplied by tensor cores.
#include "common/launch.h"
#include "decoding/decode_pages.h"
#include "decoding/plain_attention.h"
#include "decoding/tensor_attention.h"

namespace brorl {
namespace {

// A warp per head of a row: queries to the workspace, the new key and value to the place of the row's last token.
template <typename T>
__global__ void __launch_bounds__(kThreads) prepare_kernel(DecodeStep<T> s) {
  const int64_t per_row = s.heads + 2 * s.kv_heads;
  const int64_t item = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (item >= s.rows * per_row) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = item / per_row, head = item % per_row;
  const T* const x = s.qkv + item * s.d;
  const int64_t place = s.lengths[row] - 1, slot = place % kPage;
  const int64_t page = s.tables[row * s.table_size + place / kPage];
  if (head >= s.heads + s.kv_heads) {
    T* const to = value_page(s, page, head - s.heads - s.kv_heads) + slot * s.width;
    for (int64_t i = lane; i < s.d; i += kWarp) to[i] = x[i];
    return;
  }

  // Normed in float32 (Zhang & Sennrich 2019, eq. 4).
  const bool query = head < s.heads;
  const float* const norm = query ? s.q_norm : s.k_norm;
  float factor = 1;
  if (norm) {
    float square = 0;
    for (int64_t i = lane; i < s.d; i += kWarp) square += widened(x[i]) * widened(x[i]);
    factor = 1 / sqrtf(sum_over<kWarp>(square) / float(s.d) + s.eps);
  }

  // Rotated (Su et al. 2021, eq. 34): component i turns with component i + d/2.
  const int64_t half = s.d / 2;
  for (int64_t i = lane; i < half; i += kWarp) {
    const float first = widened(x[i]) * (norm ? factor * norm[i] : 1.0f);
    const float second = widened(x[half + i]) * (norm ? factor * norm[half + i] : 1.0f);
    const float c = s.cos[row * half + i], sine = s.sin[row * half + i];
    const float a = first * c - second * sine, b = second * c + first * sine;
    if (query) {
      float* const to = s.queries + (row * s.heads + head) * s.d;
      to[i] = a * s.scale;
      to[half + i] = b * s.scale;
    } else {
      T* const to = key_page(s, page, head - s.heads) + slot;
      put(to + i * kPage, a);
      put(to + (half + i) * kPage, b);
    }
  }
}

// A block per chunk of a prompt, kv head, and tile of rows, which is one run of siblings after another.
template <typename How>
__global__ void __launch_bounds__(kThreads, How::kBlocks) prompt_kernel(DecodeStep<typename How::Value> s) {
  const int64_t chunks = s.prompt_chunks(), chunk = blockIdx.x % chunks, head = blockIdx.x / chunks % s.kv_heads;
  const int64_t tile = How::kQueries / (s.heads / s.kv_heads), start = blockIdx.x / (chunks * s.kv_heads) * tile;
  const int64_t stop = start + tile < s.rows ? start + tile : s.rows;
  for (int64_t begin = start; begin < stop;) {
    const int64_t prompt = s.prompts[begin];
    int64_t end = begin + 1;
    while (end < stop && s.prompts[end] == prompt) ++end;
    const int32_t* const table = s.prompt_tables + prompt * s.prompt_table_size;
    How::attend({s, head, begin, end, table, s.prompt_lengths[prompt], chunk, chunk});
    begin = end;
  }
}

// A block per chunk of a row's own tokens and kv head.
template <typename How>
__global__ void __launch_bounds__(kThreads, How::kBlocks) own_kernel(DecodeStep<typename How::Value> s) {
  const int64_t chunks = s.own_chunks(), chunk = blockIdx.x % chunks, head = blockIdx.x / chunks % s.kv_heads;
  const int64_t row = blockIdx.x / (chunks * s.kv_heads);
  const int32_t* const table = s.tables + row * s.table_size;
  How::attend({s, head, row, row + 1, table, s.lengths[row], chunk, s.prompt_chunks() + chunk});
}

// A warp per query head of a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) merge_kernel(DecodeStep<T> s) {
  const int64_t item = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (item >= s.rows * s.heads) return;
  const int64_t chunks = s.prompt_chunks() + s.own_chunks();
  const float* const sums = s.sums + item * chunks * 2;
  float largest = -INFINITY, sum = 0;
  for (int64_t c = 0; c < chunks; ++c) largest = fmaxf(largest, sums[2 * c]);
  for (int64_t c = 0; c < chunks; ++c) sum += expf(sums[2 * c] - largest) * sums[2 * c + 1];
  for (int64_t i = threadIdx.x % kWarp; i < s.d; i += kWarp) {
    float total = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      // Of a chunk without tokens nothing was written.
      if (sums[2 * c + 1] > 0) total += expf(sums[2 * c] - largest) * s.totals[(item * chunks + c) * s.d + i];
    }
    put(s.out + item * s.d + i, total / sum);
  }
}

template <typename Prompt, typename Own>
const char* launch_by(const DecodeStep<typename Own::Value>& s, cudaStream_t stream) {
  const auto warps = [](int64_t items) { return (items * kWarp + kThreads - 1) / kThreads; };
  const int64_t tile = Prompt::kQueries / (s.heads / s.kv_heads), tiles = (s.rows + tile - 1) / tile;
  const char* error = launch_kernel(
      prepare_kernel<typename Own::Value>, warps(s.rows * (s.heads + 2 * s.kv_heads)), kThreads, stream, s);
  if (!error && s.prompt_chunks()) {
    error = launch_kernel(prompt_kernel<Prompt>, tiles * s.kv_heads * s.prompt_chunks(), kThreads, stream, s);
  }
  if (!error) error = launch_kernel(own_kernel<Own>, s.rows * s.kv_heads * s.own_chunks(), kThreads, stream, s);
  if (error) return error;
  return launch_kernel(merge_kernel<typename Own::Value>, warps(s.rows * s.heads), kThreads, stream, s);
}

template <int kWide>
const char* launch_wide(const DecodeStep<float>& s, cudaStream_t stream) {
  return launch_by<Plain<float, kWide>, Plain<float, kWide>>(s, stream);
}

template <int kWide>
const char* launch_wide(const DecodeStep<uint16_t>& s, cudaStream_t stream) {
  // 32 queries of 256 do not fit in the shared memory that a block has without asking.
  using Prompt = TensorCores<kWide == 256 ? 16 : 32, kWide>;
  if (s.d % kCube == 0) return launch_by<Prompt, TensorCores<16, kWide>>(s, stream);
  return launch_by<Plain<uint16_t, kWide>, Plain<uint16_t, kWide>>(s, stream);
}

template <typename T>
const char* launch(const DecodeStep<T>& s, cudaStream_t stream) {
  if (s.width <= 64) return launch_wide<64>(s, stream);
  return s.width <= 128 ? launch_wide<128>(s, stream) : launch_wide<256>(s, stream);
}

}  // namespace

const char* decode_attention_launch(const DecodeStep<float>& step, CUstream_st* stream) { return launch(step, stream); }

const char* decode_attention_launch(const DecodeStep<uint16_t>& step, CUstream_st* stream) {
  return launch(step, stream);
}

}  // namespace brorl
