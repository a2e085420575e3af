// A machine that runs CUDA kernels on one CPU thread, to test them: a block's threads are fibers, which run in random
// order from one place where they meet (barrier, shuffle, vote) to the next. A result that hangs on an order which no
// barrier brings about comes out wrong. What a GPU would leave undefined ends the launch with words:
//   a barrier or shuffle that not all of its threads reach, or that they reach at different places of the source;
//   loads and stores outside of tensors, to the byte (memory.cpp); indices outside of shared and local arrays.
#pragma once

#include <cstdint>
#include <functional>

namespace emulation {

struct Index {
  unsigned x;
};
extern Index threadIdx, blockIdx;

// A line of the kernel: that of the call, as a default argument.
struct Place {
  const char* file;
  int line;
  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// All blocks of a launch, one after another in random order. Null, or what went wrong, for the first thread that did.
const char* run(int64_t blocks, int threads, const std::function<void()>& kernel);

// Return whether a kernel is running. Its loads and stores must be inside of tensors.
bool running();

// Called by a thread of a kernel: it ends the launch.
[[noreturn]] void fail(const char* what, Place place);

// Wait for all threads of the block.
void meet_block(Place place);

// Wait for the lanes in the mask; the 32 values that they brought, until the warp meets again.
const uint64_t* meet_warp(unsigned mask, uint64_t value, Place place);

}  // namespace emulation
