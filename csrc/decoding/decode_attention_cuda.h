// Between decode_attention_cuda.cpp and decode_attention.cu; neither CUDA nor torch types.
#pragma once

#include <cstdint>

#include "common/host_device.h"

struct CUstream_st;

namespace brorl {

constexpr int64_t kChunkPages = 32;     // of keys and values that one block of threads attends to
constexpr int64_t kQueriesAtOnce = 16;  // query heads of a kv head that a block takes at least

// The tensors of cpu/decode_attention.h; T of qkv, keys, values and out is float, or the bits of bfloat16.
template <typename T>
struct DecodeStep {
  const T* qkv;
  const float *q_norm, *k_norm, *cos, *sin;  // norms may be null
  T *keys, *values;
  const int32_t *tables, *prompt_tables;
  const int64_t *lengths, *prompt_lengths, *prompts;
  T* out;
  int64_t rows, heads, kv_heads, d, width, table_size, prompt_table_size;
  float scale, eps;

  // Workspace: queries [rows, heads, d], normed, rotated and scaled; of every chunk the softmax so far, its largest score
  // and its sum [rows, heads, chunks, 2], and what it has added up [rows, heads, chunks, d].
  float *queries, *sums, *totals;

  BRORL_HOST_DEVICE int64_t prompt_chunks() const { return (prompt_table_size + kChunkPages - 1) / kChunkPages; }
  BRORL_HOST_DEVICE int64_t own_chunks() const { return (table_size + kChunkPages - 1) / kChunkPages; }
};

// rows > 0 and heads / kv_heads <= kQueriesAtOnce. Returns nullptr, or what CUDA says went wrong.
const char* decode_attention_launch(const DecodeStep<float>& step, CUstream_st* stream);
const char* decode_attention_launch(const DecodeStep<uint16_t>& step, CUstream_st* stream);

}  // namespace brorl
