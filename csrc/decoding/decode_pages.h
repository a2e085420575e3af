// What the kernels of a decoding step share: pages, and which queries a block attends with to which tokens. For .cu files
// only.
#pragma once

#include <cmath>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "decoding/decode_attention_cuda.h"

namespace brorl {
namespace {

constexpr int kThreads = 256, kWarp = 32, kPage = 16;
constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(uint16_t bfloat16) { return __uint_as_float(unsigned(bfloat16) << 16); }

__device__ __forceinline__ void put(float* to, float x) { *to = x; }
__device__ __forceinline__ void put(uint16_t* to, float x) {
  *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(x);
}

// Over the lanes of a warp, or over so many neighbours of it.
template <int lanes>
__device__ __forceinline__ float sum_over(float x) {
  for (int step = lanes / 2; step; step /= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
  return x;
}

template <int lanes>
__device__ __forceinline__ float largest_over(float x) {
  for (int step = lanes / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, step));
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

// Query heads of kv head `head` of rows begin .. end, which attend to the tokens first .. last of a table; `part` of all
// chunks is theirs.
template <typename T>
struct Chunk {
  const DecodeStep<T>& s;
  int64_t head, begin, part;
  const int32_t* table;
  int64_t first, last;
  int group, count;  // query heads of a row; of all rows

  __device__ __forceinline__ Chunk(
      const DecodeStep<T>& s, int64_t head, int64_t begin, int64_t end, const int32_t* table, int64_t length,
      int64_t chunk, int64_t part)
      : s(s), head(head), begin(begin), part(part), table(table), first(chunk * kChunkPages * kPage),
        last(length < first + kChunkPages * kPage ? length : first + kChunkPages * kPage),
        group(int(s.heads / s.kv_heads)), count(int(end - begin) * group) {}

  // Of all query heads of all rows; those of a row that share a kv head lie side by side.
  __device__ __forceinline__ int64_t place(int query) const {
    return (begin + query / group) * s.heads + head * group + query % group;
  }

  // Of this chunk's part for the query, in s.sums and s.totals.
  __device__ __forceinline__ int64_t result(int query) const {
    return place(query) * (s.prompt_chunks() + s.own_chunks()) + part;
  }

  __device__ __forceinline__ const T* keys(int64_t token) const { return key_page(s, table[token / kPage], head); }
  __device__ __forceinline__ const T* values(int64_t token) const { return value_page(s, table[token / kPage], head); }
};

}  // namespace
}  // namespace brorl
