// The op around sample_row.h: checks, allocation, and the loop over rows.
#include "cpu/sample_tokens.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <omp.h>

#include "common/philox.h"
#include "cpu/sample_row.h"

namespace brorl {
namespace {

using at::Tensor;

void check(
    const Tensor& logits, const Tensor& keys, const Tensor& index, const Tensor& position, double temperature,
    double top_p, int64_t top_k) {
  TORCH_CHECK_VALUE(logits.dim() == 2, "logits must be [B, V], got ", logits.sizes());
  const auto dtype = logits.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16, "logits must be float32 or bfloat16, got ", dtype);
  TORCH_CHECK_VALUE(
      logits.size(1) > 0 && logits.size(1) <= std::numeric_limits<int32_t>::max(),
      "the vocabulary must have 1 to 2^31 - 1 tokens, got ", logits.size(1));
  const auto vector = [&](const Tensor& x, const char* name) {
    TORCH_CHECK_VALUE(
        x.dim() == 1 && x.size(0) == logits.size(0), name, " must be [", logits.size(0), "], got ", x.sizes());
    TORCH_CHECK_TYPE(x.scalar_type() == at::kLong, name, " must be int64, got ", x.scalar_type());
  };
  vector(keys, "keys");
  vector(index, "index");
  vector(position, "position");
  TORCH_CHECK_VALUE(
      temperature >= 0 && std::isfinite(temperature), "temperature must be 0 or above and finite, got ", temperature);
  TORCH_CHECK_VALUE(top_p > 0 && top_p <= 1, "top_p must be in (0, 1], got ", top_p);
  TORCH_CHECK_VALUE(top_k >= 0, "top_k must be 0 (off) or above, got ", top_k);
}

// Rows may be strided, tokens must be contiguous.
Tensor rows_of(const Tensor& logits) {
  return logits.stride(1) == 1 || logits.size(1) == 1 ? logits : logits.contiguous();
}

template <typename T>
void run(
    const T* logits, int64_t rows, int64_t vocab, int64_t stride, const double* uniforms, SampleSettings settings,
    int64_t* ids, float* log_probs) {
  const int threads = int(std::min<int64_t>(at::get_num_threads(), rows));
  std::vector<RowSampler<T>> samplers(threads, RowSampler<T>(vocab, settings));
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    const Drawn drawn = samplers[omp_get_thread_num()].draw(logits + i * stride, uniforms[i]);
    ids[i] = drawn.id;
    log_probs[i] = drawn.log_prob;
  }
}

void raise_for_row(const Tensor& logits, int64_t row) {
  const Tensor row_logits = logits[row].to(at::kFloat).contiguous();
  const float* z = row_logits.const_data_ptr<float>();
  for (int64_t j = 0; j < row_logits.size(0); ++j) {
    TORCH_CHECK_VALUE(z[j] < std::numeric_limits<float>::infinity(), "logits[", row, ", ", j, "] is ", z[j]);
  }
  TORCH_CHECK_VALUE(false, "logits[", row, "] is -inf throughout: there is no token to draw");
}

}  // namespace

std::tuple<Tensor, Tensor> sample_tokens(
    const Tensor& logits, const Tensor& keys, const Tensor& index, const Tensor& position, double temperature,
    double top_p, int64_t top_k) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(logits, keys, index, position, temperature, top_p, top_k);
  const Tensor z = rows_of(logits), k = keys.contiguous(), i = index.contiguous(), p = position.contiguous();
  const int64_t rows = z.size(0), vocab = z.size(1);
  const Tensor ids = at::empty({rows}, keys.options()), log_probs = at::empty({rows}, logits.options().dtype(at::kFloat));
  if (!rows) return {ids, log_probs};
  const auto *key = k.const_data_ptr<int64_t>(), *rollout = i.const_data_ptr<int64_t>();
  const auto* token = p.const_data_ptr<int64_t>();
  std::vector<double> uniforms(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const bool fits = key[r] >= 0 && (rollout[r] | token[r]) >> 32 == 0;
    TORCH_CHECK_VALUE(
        fits, "row ", r, ": keys must not be negative, and index and position must be in [0, 2^32); got ", key[r], ", ",
        rollout[r], " and ", token[r]);
    uniforms[r] = philox_uniform(key[r], rollout[r], token[r]);
  }
  const SampleSettings settings{temperature, top_p, top_k};
  int64_t* const id = ids.mutable_data_ptr<int64_t>();
  float* const log_prob = log_probs.mutable_data_ptr<float>();
  if (z.scalar_type() == at::kFloat) {
    run(z.const_data_ptr<float>(), rows, vocab, z.stride(0), uniforms.data(), settings, id, log_prob);
  } else {
    const auto* bits = reinterpret_cast<const uint16_t*>(z.const_data_ptr<at::BFloat16>());
    run(bits, rows, vocab, z.stride(0), uniforms.data(), settings, id, log_prob);
  }
  const int64_t* bad = std::find(id, id + rows, -1);
  if (bad != id + rows) raise_for_row(z, bad - id);
  return {ids, log_probs};
}

}  // namespace brorl
