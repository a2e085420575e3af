// Memory of the emulated device. Each allocation has pages of its own with a free one before it and after it, and no
// address is given out twice, so that any access of a kernel outside of it is seen.
#pragma once

#include <cstddef>

namespace emulation {

// `bytes` of 0xff: numbers that are read before they are written are not numbers, indices are -1.
void* allocate(size_t bytes);
void release(void* begin);

}  // namespace emulation
