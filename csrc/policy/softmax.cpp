#include "policy/softmax.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "common/cuda_launch.h"
#include "common/tensor_checks.h"
#include "policy/softmax_cuda.h"
#include "policy/softmax_row.h"

namespace brorl {
namespace {

using at::Tensor;

void check(const Tensor& logits, const Tensor& ids, double temperature) {
  TORCH_CHECK_TYPE(
      logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kDouble,
      "logits must be float32 or float64, got ", logits.scalar_type());
  TORCH_CHECK_VALUE(
      logits.dim() == 2 && (logits.numel() == 0 || logits.stride(1) == 1),
      "logits must be [R, V] with contiguous rows, got ", logits.sizes(), " with strides ", logits.strides());
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong, "ids must be int64, got ", ids.scalar_type());
  TORCH_CHECK_VALUE(
      ids.dim() == 1 && ids.size(0) == logits.size(0), "ids must be [", logits.size(0), "], got ", ids.sizes());
  TORCH_CHECK_VALUE(temperature > 0, "temperature must be above 0, got ", temperature);
}

#ifdef BRORL_CUDA
// Return the distance of rows, which the kernels access by four elements.
int64_t vector_stride(const Tensor& logits) {
  const int64_t stride = logits.stride(0);
  TORCH_CHECK_VALUE(
      stride % 4 == 0 && reinterpret_cast<uintptr_t>(logits.const_data_ptr()) % (4 * logits.element_size()) == 0,
      "rows of logits must begin at multiples of 4 elements, got stride ", stride);
  return stride;
}
#endif

Tensor check_upstream(const Tensor& x, const char* name, const Tensor& logits) {
  TORCH_CHECK_VALUE(
      x.dim() == 1 && x.size(0) == logits.size(0) && x.scalar_type() == logits.scalar_type(), name, " must be [",
      logits.size(0), "] ", logits.scalar_type(), ", got ", x.sizes(), " ", x.scalar_type());
  return x.contiguous();
}

}  // namespace

Tensor softmax_statistics(const Tensor& logits, const Tensor& ids, int64_t start, double temperature) {
  check(logits, ids, temperature);
  const Tensor targets = ids.contiguous();
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  const Tensor statistics = at::empty({rows, 4}, logits.options().dtype(at::kDouble));
  const auto* const target = targets.const_data_ptr<int64_t>();
  auto* const out = statistics.mutable_data_ptr<double>();
  with_type(logits, [&](auto zero) {
    using S = decltype(zero);
    const S* const data = logits.const_data_ptr<S>();
#ifdef BRORL_CUDA
    if (on_device(logits)) {
      const c10::DeviceGuard guard(logits.device());
      check_launch("softmax_statistics", softmax_statistics_launch<S>(
          data, vector_stride(logits), target, out, rows, vocab, start, temperature, current_stream(logits)));
      return;
    }
#endif
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads())
    for (int64_t i = 0; i < rows; ++i) {
      const S* const row = data + i * logits.stride(0);
      const SoftmaxPart<double> part = softmax_row(row, vocab, S(1 / temperature));
      const int64_t local_id = target[i] - start;
      const double values[] = {
          part.largest, part.sum, part.weighted, local_id >= 0 && local_id < vocab ? double(row[local_id]) : 0.0};
      std::copy(values, values + 4, out + 4 * i);
    }
  });
  return statistics;
}

void softmax_gradient_(
    Tensor& logits, const Tensor& ids, const Tensor& statistics, const Tensor& log_prob_gradient,
    const std::optional<Tensor>& entropy_gradient, int64_t start, double temperature, bool narrow) {
  check(logits, ids, temperature);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  TORCH_CHECK_VALUE(
      statistics.dim() == 2 && statistics.size(0) == rows && statistics.size(1) == 4 && statistics.is_contiguous() &&
          statistics.scalar_type() == at::kDouble,
      "statistics must be [", rows, ", 4] float64, got ", statistics.sizes(), " ", statistics.scalar_type());
  TORCH_CHECK_TYPE(!narrow || logits.scalar_type() == at::kFloat, "bfloat16 gradients need float32 logits");
  const Tensor targets = ids.contiguous();
  const Tensor upstream_log_prob = check_upstream(log_prob_gradient, "log_prob_gradient", logits);
  const Tensor upstream_entropy =
      entropy_gradient ? check_upstream(*entropy_gradient, "entropy_gradient", logits) : Tensor();
  const auto* const target = targets.const_data_ptr<int64_t>();
  const auto* const values = statistics.const_data_ptr<double>();
  with_type(logits, [&](auto zero) {
    using S = decltype(zero);
    S* const data = logits.mutable_data_ptr<S>();
    const S* const u = upstream_log_prob.const_data_ptr<S>();
    const S* const c = upstream_entropy.defined() ? upstream_entropy.const_data_ptr<S>() : nullptr;
#ifdef BRORL_CUDA
    if (on_device(logits)) {
      const c10::DeviceGuard guard(logits.device());
      check_launch("softmax_gradient_", softmax_gradient_launch<S>(
          data, vector_stride(logits), target, values, u, c, rows, vocab, start, temperature, narrow,
          current_stream(logits)));
      return;
    }
#endif
    const double inverse = 1 / temperature;
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads())
    for (int64_t i = 0; i < rows; ++i) {
      const double* const s = values + 4 * i;
      const auto gradient = softmax_gradient<S>(
          {s[0], s[1], s[2]}, (s[3] - s[0]) * inverse, u[i], c ? c[i] : S(0), inverse);
      softmax_gradient_row(
          data + i * logits.stride(0), vocab, target[i] - start, S(s[0]), gradient, S(inverse), narrow);
    }
  });
}

}  // namespace brorl
