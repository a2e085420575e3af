#pragma once

#include <cstdint>

namespace brorl {

template <typename T>
struct Matrix {
  const T* data;
  int64_t row_stride, column_stride;  // in elements; one of them is 1
};

}  // namespace brorl
