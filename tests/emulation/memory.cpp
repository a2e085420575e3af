// With -fsanitize=thread compilers call these functions at each load and store, with -fsanitize=bounds at an index
// outside of an array. They replace the functions of the sanitizers.
#include "memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "machine.h"

namespace emulation {
namespace {

constexpr size_t kPage = 4096, kArena = size_t(1) << 38;

struct Allocation {
  char *begin, *end;
};

char* reserved(size_t bytes) {
  return static_cast<char*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

char* const arena = reserved(kArena);
uint32_t* const owners = reinterpret_cast<uint32_t*>(reserved(kArena / kPage * sizeof(uint32_t)));  // by page; 0: free
std::vector<Allocation> allocations(1);
size_t next_page = 1;

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage; }

bool in_arena(const void* p) { return p >= arena && p < arena + kArena; }

Allocation& owner(const void* p) { return allocations[owners[(static_cast<const char*>(p) - arena) / kPage]]; }

void check_access(const void* p, size_t bytes, bool store) {
  if (!in_arena(p) || !running()) return;
  const char* const begin = static_cast<const char*>(p);
  const Allocation& tensor = owner(p);
  if (!tensor.begin || begin < tensor.begin || begin + bytes > tensor.end) {
    fail(store ? "a store outside of any tensor" : "a load outside of any tensor", {"a kernel", 0});
  }
}

}  // namespace

void* allocate(size_t bytes) {
  if (!bytes) return nullptr;
  char* const begin = arena + next_page * kPage;
  std::memset(begin, 0xff, bytes);
  allocations.push_back({begin, begin + bytes});
  for (size_t i = 0; i < pages(bytes); ++i) owners[next_page + i] = uint32_t(allocations.size() - 1);
  next_page += pages(bytes) + 1;
  return begin;
}

void release(void* begin) {
  if (!begin) return;
  const Allocation& tensor = owner(begin);
  const size_t count = pages(tensor.end - tensor.begin);
  std::memset(owners + (tensor.begin - arena) / kPage, 0, count * sizeof(uint32_t));
  madvise(begin, count * kPage, MADV_DONTNEED);
}

}  // namespace emulation

extern "C" {

#define ACCESS(bytes)                                                          \
  void __tsan_read##bytes(void* p) { emulation::check_access(p, bytes, false); }      \
  void __tsan_write##bytes(void* p) { emulation::check_access(p, bytes, true); }      \
  void __tsan_unaligned_read##bytes(void* p) { emulation::check_access(p, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* p) { emulation::check_access(p, bytes, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, size_t bytes) { emulation::check_access(p, bytes, false); }
void __tsan_write_range(void* p, size_t bytes) { emulation::check_access(p, bytes, true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}

void __ubsan_handle_out_of_bounds(void* data, void*) {
  const auto* const place = static_cast<const emulation::Place*>(data);  // starts like clang's and GCC's SourceLocation
  emulation::fail("an index outside of an array", *place);
}
}
