// An emulator of CUDA kernels on one CPU thread, for tests. The threads of a block are fibers, which run in random
// order from one synchronisation (barrier, shuffle, vote) to the next, so that a missing barrier usually gives wrong
// results. Undefined behaviour ends the launch with an error:
//   a barrier or shuffle that some threads do not reach, or that they reach at different lines of the source;
//   loads and stores outside of tensors, to the byte (memory.cpp); indices outside of shared and local arrays.
#pragma once

#include <cstdint>
#include <functional>

namespace emulation {

struct Index {
  unsigned x;
};
extern Index threadIdx, blockIdx;

// A source line of the kernel. As a default argument it is the line of the call.
struct Place {
  const char* file;
  int line;
  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// Run all blocks of a launch one after another, in random order. Returns nullptr, or the first error.
const char* run(int64_t blocks, int threads, const std::function<void()>& kernel);

// Return whether a kernel is running. Its loads and stores must be inside of tensors.
bool running();

// Called by a thread of a kernel. Ends the launch with an error.
[[noreturn]] void fail(const char* what, Place place);

// Wait for all threads of the block.
void meet_block(Place place);

// Wait for the lanes in the mask and return their 32 values, which are valid until the warp synchronises again.
const uint64_t* meet_warp(unsigned mask, uint64_t value, Place place);

}  // namespace emulation
