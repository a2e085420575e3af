// One decoding step's attention over pages in place: nothing is gathered, nothing widened in memory.
//
// Keys and values are cut into chunks of 32 pages. A block of threads takes one chunk and one kv head: of a prompt for as
// many rows as share it and have sixteen query heads together, so that each of its pages is read once for all of them; of
// a row's own tokens for its query heads. Softmax runs online over the pages of a chunk (Milakov & Gimelshein 2018), and
// the chunks of a query are added up at the end by their largest scores and sums (Dao et al. 2023, flash-decoding). How
// much there is to do follows from the tables' sizes, so that the host need not wait for lengths: blocks beyond the end
// of a text say so and leave.
#include "decoding/decode_attention_cuda.h"

#include <cmath>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "common/launch.h"

namespace brorl {
namespace {

constexpr int kThreads = 256, kWarp = 32, kPage = 16;
constexpr int kBlocks = 2;  // per multiprocessor; left to itself, the compiler aims for more and spills
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kQueries = int(kQueriesAtOnce);
static_assert(kQueries * kPage == kThreads, "a thread has one score of a page");

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(uint16_t bfloat16) { return __uint_as_float(unsigned(bfloat16) << 16); }

__device__ __forceinline__ void put(float* to, float x) { *to = x; }
__device__ __forceinline__ void put(uint16_t* to, float x) {
  *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(x);
}

// Over the lanes of a warp, or over the sixteen of a query.
template <int lanes>
__device__ __forceinline__ float sum_over(float x) {
  for (int step = lanes / 2; step; step /= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
  return x;
}

__device__ __forceinline__ float largest_of_query(float x) {
  for (int step = kPage / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, step));
  return x;
}

template <typename T>
__device__ __forceinline__ T* key_page(const DecodeStep<T>& s, int64_t page, int64_t head) {
  return s.keys + (page * s.kv_heads + head) * s.d * kPage;
}

template <typename T>
__device__ __forceinline__ T* value_page(const DecodeStep<T>& s, int64_t page, int64_t head) {
  return s.values + (page * s.kv_heads + head) * kPage * s.width;
}

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

// `count` values, a multiple of 4, to shared memory.
template <typename T>
__device__ __forceinline__ void load_page(const T* from, int count, float* to) {
  struct alignas(4 * sizeof(T)) Four {
    T x[4];
  };
  for (int i = 4 * threadIdx.x; i < count; i += 4 * kThreads) {
    const Four four = *reinterpret_cast<const Four*>(from + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[i + j] = widened(four.x[j]);
  }
}

// Query heads of kv head `head` of rows begin .. end attend to the tokens of chunk `chunk` of a table; `part` of all
// chunks is theirs. All threads of the block must call it.
template <typename T, int kWide>
__device__ __forceinline__ void attend(
    const DecodeStep<T>& s, int64_t head, int64_t begin, int64_t end, const int32_t* table, int64_t length,
    int64_t chunk, int64_t part) {
  __shared__ float queries[kQueries * kWide], page[kPage * kWide], weights[kQueries * kPage];
  const int group = int(s.heads / s.kv_heads), count = int(end - begin) * group;
  const int query = threadIdx.x / kPage, lane = threadIdx.x % kPage;
  const int64_t row = begin + query / group, place = row * s.heads + head * group + query % group;
  const int64_t result = place * (s.prompt_chunks() + s.own_chunks()) + part;
  const int64_t first = chunk * kChunkPages * kPage;
  const int64_t last = length < first + kChunkPages * kPage ? length : first + kChunkPages * kPage;
  const bool active = query < count;
  const int d = int(s.d), width = int(s.width);

  // The query heads of a row that share a kv head lie side by side.
  __syncthreads();  // the call before has read its own
  for (int i = threadIdx.x; i < count * d; i += kThreads) {
    const int64_t of_row = begin + i / (group * d);
    queries[i] = s.queries[(of_row * s.heads + head * group) * d + i % (group * d)];
  }

  float largest = -INFINITY, sum = 0, total[kWide / kPage] = {};
  for (int64_t token = first; token < last; token += kPage) {
    const int64_t here = table[token / kPage];
    const int there = int(last - token < kPage ? last - token : kPage);  // tokens of this page

    // A score per thread; what lies behind the last token may be anything.
    __syncthreads();  // values of the page before are read
    load_page(key_page(s, here, head), d * kPage, page);
    __syncthreads();
    float score = 0;
    if (active) {
      for (int i = 0; i < d; ++i) score += queries[query * d + i] * page[i * kPage + lane];
    }
    const bool counts = active && lane < there;
    const float top = fmaxf(largest, largest_of_query(counts ? score : -INFINITY));
    const float weight = counts ? expf(score - top) : 0.0f, shrink = active ? expf(largest - top) : 0.0f;
    sum = sum * shrink + sum_over<kPage>(weight);
    largest = top;
    weights[threadIdx.x] = weight;

    // Sixteen threads add up the values for a query, each some columns of them.
    __syncthreads();  // keys are read, weights written
    load_page(value_page(s, here, head), kPage * width, page);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kWide / kPage; ++j) {
      if (!active || j * kPage >= width) continue;
      total[j] *= shrink;
      for (int key = 0; key < there; ++key) {
        total[j] += weights[query * kPage + key] * page[key * width + j * kPage + lane];
      }
    }
  }

  if (!active) return;
  if (lane == 0) {
    s.sums[2 * result] = largest;  // of a chunk without tokens -inf
    s.sums[2 * result + 1] = sum;
  }
  if (first >= last) return;
#pragma unroll
  for (int j = 0; j < kWide / kPage; ++j) {
    if (j * kPage + lane < d) s.totals[result * d + j * kPage + lane] = total[j];
  }
}

// A block per chunk of a prompt, kv head, and tile of rows, which is one run of siblings after another.
template <typename T, int kWide>
__global__ void __launch_bounds__(kThreads, kBlocks) prompt_kernel(DecodeStep<T> s) {
  const int64_t chunks = s.prompt_chunks(), chunk = blockIdx.x % chunks, head = blockIdx.x / chunks % s.kv_heads;
  const int64_t tile = kQueries / (s.heads / s.kv_heads), start = blockIdx.x / (chunks * s.kv_heads) * tile;
  const int64_t stop = start + tile < s.rows ? start + tile : s.rows;
  for (int64_t begin = start; begin < stop;) {
    const int64_t prompt = s.prompts[begin];
    int64_t end = begin + 1;
    while (end < stop && s.prompts[end] == prompt) ++end;
    const int32_t* const table = s.prompt_tables + prompt * s.prompt_table_size;
    attend<T, kWide>(s, head, begin, end, table, s.prompt_lengths[prompt], chunk, chunk);
    begin = end;
  }
}

// A block per chunk of a row's own tokens and kv head.
template <typename T, int kWide>
__global__ void __launch_bounds__(kThreads, kBlocks) own_kernel(DecodeStep<T> s) {
  const int64_t chunks = s.own_chunks(), chunk = blockIdx.x % chunks, head = blockIdx.x / chunks % s.kv_heads;
  const int64_t row = blockIdx.x / (chunks * s.kv_heads);
  attend<T, kWide>(
      s, head, row, row + 1, s.tables + row * s.table_size, s.lengths[row], chunk, s.prompt_chunks() + chunk);
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

template <typename T, int kWide>
const char* launch_wide(const DecodeStep<T>& s, cudaStream_t stream) {
  const auto warps = [](int64_t items) { return (items * kWarp + kThreads - 1) / kThreads; };
  const int64_t tile = kQueries / (s.heads / s.kv_heads), tiles = (s.rows + tile - 1) / tile;
  const char* error =
      launch_kernel(prepare_kernel<T>, warps(s.rows * (s.heads + 2 * s.kv_heads)), kThreads, stream, s);
  if (!error && s.prompt_chunks()) {
    error = launch_kernel(prompt_kernel<T, kWide>, tiles * s.kv_heads * s.prompt_chunks(), kThreads, stream, s);
  }
  if (!error) error = launch_kernel(own_kernel<T, kWide>, s.rows * s.kv_heads * s.own_chunks(), kThreads, stream, s);
  return error ? error : launch_kernel(merge_kernel<T>, warps(s.rows * s.heads), kThreads, stream, s);
}

template <typename T>
const char* launch(const DecodeStep<T>& s, cudaStream_t stream) {
  if (s.width <= 64) return launch_wide<T, 64>(s, stream);
  return s.width <= 128 ? launch_wide<T, 128>(s, stream) : launch_wide<T, 256>(s, stream);
}

}  // namespace

const char* decode_attention_launch(const DecodeStep<float>& step, CUstream_st* stream) { return launch(step, stream); }

const char* decode_attention_launch(const DecodeStep<uint16_t>& step, CUstream_st* stream) {
  return launch(step, stream);
}

}  // namespace brorl
