// Helpers between the torch side of an op and its kernels. Kernels are in .cu files that take raw pointers and a stream
// and include no torch header, so that plain nvcc compiles them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#ifdef BRORL_CUDA
#include "common/current_stream.h"
#endif

namespace brorl {

// Return whether an op starts kernels. Each op is registered for the CPU and for one other kind of device.
inline bool on_device(const at::Tensor& x) { return !x.is_cpu(); }

// Raise if a launcher returned an error text. Launchers return nullptr on success.
inline void check_launch(const char* op, const char* error) {
  TORCH_CHECK(error == nullptr, op, ": CUDA refused the launch: ", error);
}

}  // namespace brorl
