// Fresh memory of large results in pages of 2 MiB where Linux has them: touching it in pages of 4 KiB takes longer than
// the ops that fill it.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace brorl {

// A hint: nothing changes for small tensors, other devices, or where the system refuses.
inline void prefer_huge_pages(const at::Tensor& x) {
#ifdef __linux__
  constexpr uintptr_t page = 4096, huge = 2 << 20;
  if (!x.is_cpu() || x.nbytes() < 2 * huge) return;
  const auto begin = (reinterpret_cast<uintptr_t>(x.data_ptr()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(x.data_ptr()) + x.nbytes()) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace brorl
