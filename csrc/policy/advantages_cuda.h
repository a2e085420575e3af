// Between advantages.cpp and advantages.cu; neither CUDA nor torch types.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace brorl {

// mask: null or [T]; bootstrap: null or [segments]. Launchers return nullptr, or what CUDA says went wrong.
#define BRORL_GAE_LAUNCH(S) \
  const char* gae_launch( \
      const S* rewards, const S* values, const int64_t* starts, const bool* mask, const S* bootstrap, double gamma, \
      double lambda, int64_t segments, S* advantages, S* returns, CUstream_st* stream)
BRORL_GAE_LAUNCH(float);
BRORL_GAE_LAUNCH(double);

// mask: null or [B].
#define BRORL_GROUP_LAUNCH(S) \
  const char* group_advantages_launch( \
      const S* rewards, const int64_t* starts, const bool* mask, bool by_std, int64_t groups, S* advantages, \
      CUstream_st* stream)
BRORL_GROUP_LAUNCH(float);
BRORL_GROUP_LAUNCH(double);

}  // namespace brorl
