// Memory of the emulated device. Every allocation has its own pages between two unused pages, and no address is used
// twice, so that every access outside of an allocation is detected.
#pragma once

#include <cstddef>

namespace emulation {

// Allocate `bytes` of 0xff, so that unwritten floats are NaN and unwritten indices -1.
void* allocate(size_t bytes);
void release(void* begin);

}  // namespace emulation
