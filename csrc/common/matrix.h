#pragma once

#include <cstdint>

namespace brorl {

template <typename T>
struct Matrix {
  const T* data;
  int64_t row, column;  // strides in elements, one of which is 1
};

}  // namespace brorl
