// The ops with CUDA kernels, and their registration for one kind of device.
#pragma once

#include "common/gemm.h"
#include "common/uniforms.h"
#include "policy/advantages.h"
#include "policy/ppo_tokens.h"
#include "policy/softmax.h"
#include "policy/value_loss.h"

// Functions that run on the CPU and, in a CUDA build, on CUDA.
#define BRORL_IMPLEMENT(library)                                  \
  library.impl("gemm_", &brorl::gemm_);                           \
  library.impl("uniforms", &brorl::uniforms);                     \
  library.impl("softmax_statistics", &brorl::softmax_statistics); \
  library.impl("softmax_gradient_", &brorl::softmax_gradient_);   \
  library.impl("ppo_tokens", &brorl::ppo_tokens);                 \
  library.impl("value_loss", &brorl::value_loss);                 \
  library.impl("gae", &brorl::gae);                                \
  library.impl("moments", &brorl::moments);                       \
  library.impl("whiten_", &brorl::whiten);
