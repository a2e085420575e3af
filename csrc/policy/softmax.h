// Ops on a chunk of logits [R, V_local]. Under tensor parallelism each rank has a part of the vocabulary, and the
// caller merges the statistics of all ranks between the two ops. Rows are contiguous; on CUDA each must begin at a
// multiple of four elements.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace brorl {

// Return statistics [R, 4] float64 of each row: largest logit, sum, weighted (SoftmaxPart), and the logit of ids -
// start, or 0 if that is outside of this part of the vocabulary.
at::Tensor softmax_statistics(const at::Tensor& logits, const at::Tensor& ids, int64_t start, double temperature);

// Overwrite the logits by their gradient, given gradients [R] of the log-probability of ids and of the entropy.
// statistics: of the whole vocabulary. narrow: write bfloat16, into the first half of each float32 row.
void softmax_gradient_(
    at::Tensor& logits, const at::Tensor& ids, const at::Tensor& statistics, const at::Tensor& log_prob_gradient,
    const std::optional<at::Tensor>& entropy_gradient, int64_t start, double temperature, bool narrow);

}  // namespace brorl
