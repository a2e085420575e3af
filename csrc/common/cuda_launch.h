// Between the torch side of an op and its kernels. Kernels live in .cu files that see raw pointers and a stream and
// include nothing of torch, so plain nvcc compiles them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace brorl {

using Stream = CUstream_st*;

// The stream that torch currently uses on the tensor's device. A c10::DeviceGuard on that device must be alive at the
// launch.
inline Stream current_stream(const at::Tensor& x) {
  const c10::impl::VirtualGuardImpl guard(x.device().type());
  return static_cast<Stream>(guard.getStream(x.device()).native_handle());
}

// Whether an op is to start kernels: it is registered for the CPU and for one kind of device.
inline bool on_device(const at::Tensor& x) { return !x.is_cpu(); }

// Launchers return nullptr, or what CUDA says went wrong.
inline void check_launch(const char* op, const char* error) {
  TORCH_CHECK(error == nullptr, op, ": CUDA refused the launch: ", error);
}

}  // namespace brorl
