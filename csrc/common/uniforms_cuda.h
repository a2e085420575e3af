// Launcher of uniforms.cu. Pointers are device memory. It returns nullptr, or CUDA's error text.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace brorl {

const char* uniforms_launch(
    const int64_t* keys, const int64_t* index, const int64_t* position, int64_t rows, double* result,
    CUstream_st* stream);

}  // namespace brorl
