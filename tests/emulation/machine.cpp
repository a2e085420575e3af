#include "machine.h"

#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace emulation {

Index threadIdx, blockIdx;

namespace {

constexpr unsigned kMaxThreads = 1024, kLanes = 32;  // maximum threads of a block, and threads of a warp
constexpr size_t kStackBytes = 64 << 10;  // per thread

// A synchronisation point. It keeps the values of two rounds, because some threads may still read those of one round
// while other threads write those of the next.
struct Meeting {
  std::vector<unsigned> waiting;
  Place place;
  unsigned mask;
  unsigned round;
  uint64_t values[2][kLanes];
};

struct Fiber {
  ucontext_t start;
  jmp_buf state;
  bool created;
};

Fiber fibers[kMaxThreads];
jmp_buf host;
ucontext_t creator;
std::vector<unsigned> ready;  // threads that can continue
unsigned block_threads, finished;  // numbers of threads
bool in_kernel;
const std::function<void()>* body;
Meeting block_meeting, warp_meetings[kMaxThreads / kLanes];
std::string failure;
std::minstd_rand rng;

// Switch from the running thread to one that can continue, or to the host if there is none. In 63 of 64 cases it is one
// of the last 32 that became ready, whose stacks are in cache. So one warp can get far ahead of others. rng() < 2^31.
[[noreturn]] void switch_thread() {
  if (ready.empty()) _longjmp(host, 1);
  const uint64_t random = rng();
  const size_t candidates = random % 64 ? std::min<size_t>(ready.size(), kLanes) : ready.size();
  const size_t i = ready.size() - 1 - (random * candidates >> 31);
  threadIdx.x = ready[i];
  ready[i] = ready.back();
  ready.pop_back();
  _longjmp(fibers[threadIdx.x].state, 1);
}

void wait() {
  if (!_setjmp(fibers[threadIdx.x].state)) switch_thread();
}

// Fibers are reused for later kernels, because creating one takes longer than running a block.
void run_thread() {
  if (!_setjmp(fibers[threadIdx.x].state)) setcontext(&creator);
  for (;;) {
    (*body)();
    ++finished;
    wait();
  }
}

void create_fiber(unsigned thread) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  static char* const stacks =
      static_cast<char*>(mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0));
  Fiber& fiber = fibers[thread];
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = stacks + thread * kStackBytes;
  fiber.start.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.start, run_thread, 0);
  threadIdx.x = thread;
  fiber.created = true;
  swapcontext(&creator, &fiber.start);
}

// Make all threads of the block ready, warp by warp in random order. Thread 0, which often sums the results of the
// other threads, runs before them as often as after them.
void make_all_ready() {
  static unsigned warps[kMaxThreads / kLanes];
  unsigned* const end = warps + (block_threads + kLanes - 1) / kLanes;
  std::iota(warps, end, 0);
  std::shuffle(warps, end, rng);
  ready.clear();
  for (const unsigned* warp = warps; warp != end; ++warp) {
    for (unsigned i = *warp * kLanes; i < std::min(block_threads, (*warp + 1) * kLanes); ++i) ready.push_back(i);
  }
}

void meet(Meeting& meeting, unsigned expected, unsigned mask, Place place) {
  if (meeting.waiting.empty()) {
    meeting.place = place;
    meeting.mask = mask;
  } else if (meeting.place.line != place.line || meeting.place.file != place.file || meeting.mask != mask) {
    fail("threads that must meet are at different places or have different masks", place);
  }
  meeting.waiting.push_back(threadIdx.x);
  if (meeting.waiting.size() == expected) {
    if (&meeting == &block_meeting) {
      make_all_ready();  // no other thread can be ready
    } else {
      ready.insert(ready.end(), meeting.waiting.begin(), meeting.waiting.end());
    }
    meeting.waiting.clear();
    ++meeting.round;
  }
  wait();
}

// Fill shared memory with NaN or -1 before a block runs. Shared memory is the thread-local variables of this library,
// all of which belong to kernels.
void spoil_shared() {
  static thread_local volatile bool touched;
  touched = true;  // the first access allocates this library's thread-local variables
  const auto spoil_this_library = [](dl_phdr_info* info, size_t, void*) {
    const auto address = reinterpret_cast<ElfW(Addr)>(&fibers);
    bool found = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const ElfW(Phdr)& part = info->dlpi_phdr[i];
      const ElfW(Addr) begin = info->dlpi_addr + part.p_vaddr;
      if (part.p_type == PT_LOAD && address >= begin && address < begin + part.p_memsz) found = true;
      if (part.p_type == PT_TLS) bytes = part.p_memsz;
    }
    if (found && info->dlpi_tls_data) std::memset(info->dlpi_tls_data, 0xff, bytes);
    return int(found);
  };
  dl_iterate_phdr(spoil_this_library, nullptr);
}

void run_block(unsigned block) {
  blockIdx.x = block;
  finished = 0;
  spoil_shared();
  make_all_ready();
  if (!_setjmp(host)) switch_thread();

  // No thread can continue: all are finished, or some wait for others that never arrive.
  if (!failure.empty() || finished == block_threads) return;
  for (const Meeting& meeting : warp_meetings) {
    if (!meeting.waiting.empty()) {
      failure = "lanes wait for others of their mask that do not come: " + std::string(meeting.place.file) + ":" +
          std::to_string(meeting.place.line);
      return;
    }
  }
  failure = std::to_string(block_meeting.waiting.size()) + " of " + std::to_string(block_threads) +
      " threads wait at a barrier: " + block_meeting.place.file + ":" + std::to_string(block_meeting.place.line);
}

// After a failure the threads are not continued, and later kernels create new fibers.
void discard_fibers() {
  for (Fiber& fiber : fibers) fiber.created = false;
  block_meeting.waiting.clear();
  for (Meeting& meeting : warp_meetings) meeting.waiting.clear();
}

}  // namespace

bool running() { return in_kernel; }

void fail(const char* what, Place place) {
  failure = std::string(what) + ": " + place.file + ":" + std::to_string(place.line) + ", block " +
      std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x);
  _longjmp(host, 1);
}

void meet_block(Place place) { meet(block_meeting, block_threads, 0, place); }

const uint64_t* meet_warp(unsigned mask, uint64_t value, Place place) {
  const unsigned lane = threadIdx.x % kLanes;
  if (!(mask >> lane & 1)) fail("a lane is not in the mask that it gives", place);
  Meeting& warp = warp_meetings[threadIdx.x / kLanes];
  uint64_t* const values = warp.values[(warp.round + 1) % 2];
  values[lane] = value;
  meet(warp, unsigned(__builtin_popcount(mask)), mask, place);
  return values;
}

const char* run(int64_t blocks, int threads, const std::function<void()>& kernel) {
  failure.clear();
  const bool valid = blocks >= 1 && blocks <= INT32_MAX && threads >= 1 && threads <= int(kMaxThreads);
  if (!valid) return "invalid configuration argument";
  block_threads = unsigned(threads);
  body = &kernel;
  for (unsigned i = 0; i < block_threads; ++i) {
    if (!fibers[i].created) create_fiber(i);
  }

  // The order of blocks must not matter either.
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), rng);
  in_kernel = true;
  for (size_t i = 0; i < order.size() && failure.empty(); ++i) run_block(order[i]);
  in_kernel = false;
  if (failure.empty()) return nullptr;
  discard_fibers();
  return failure.c_str();
}

}  // namespace emulation
