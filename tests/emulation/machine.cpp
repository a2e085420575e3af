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

constexpr unsigned kMost = 1024, kLanes = 32;  // maximum threads of a block, and threads of a warp
constexpr size_t kStack = 64 << 10;

// A synchronisation point. It keeps the values of two rounds, because some threads may read while others write the
// next.
struct Meeting {
  std::vector<unsigned> waiting;
  Place place;
  unsigned mask;
  unsigned round;
  uint64_t values[2][kLanes];
};

struct Fiber {
  ucontext_t birth;
  jmp_buf place;
  bool born;
};

Fiber fibers[kMost];
jmp_buf host;
ucontext_t mother;
std::vector<unsigned> ready;  // threads that can continue
unsigned size, ended;         // threads of the block; finished threads
bool inside;
const std::function<void()>* body;
Meeting of_block, of_warps[kMost / kLanes];
std::string failure;
std::minstd_rand chance;

// Switch from the running thread to one that can continue, or to the host if there is none. The next thread is usually
// of a warp that has just synchronised, whose stacks are in cache. So one warp can be far ahead of others, in random
// order.
[[noreturn]] void leave() {
  if (ready.empty()) _longjmp(host, 1);
  const uint64_t dice = chance();
  const size_t among = dice % 64 ? std::min<size_t>(ready.size(), kLanes) : ready.size();
  const size_t i = ready.size() - 1 - (dice * among >> 31);
  threadIdx.x = ready[i];
  ready[i] = ready.back();
  ready.pop_back();
  _longjmp(fibers[threadIdx.x].place, 1);
}

void wait() {
  if (!_setjmp(fibers[threadIdx.x].place)) leave();
}

// Fibers are reused for later kernels, because creating one takes longer than running a block.
void live() {
  if (!_setjmp(fibers[threadIdx.x].place)) setcontext(&mother);
  for (;;) {
    (*body)();
    ++ended;
    wait();
  }
}

void bear(unsigned thread) {
  static char* const stacks = static_cast<char*>(
      mmap(nullptr, kMost * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  Fiber& fiber = fibers[thread];
  getcontext(&fiber.birth);
  fiber.birth.uc_stack.ss_sp = stacks + thread * kStack;
  fiber.birth.uc_stack.ss_size = kStack;
  makecontext(&fiber.birth, live, 0);
  threadIdx.x = thread;
  fiber.born = true;
  swapcontext(&mother, &fiber.birth);
}

// Make all threads of the block ready, warp by warp in random order. Thread 0, which often sums the results of others,
// runs as often before them as after.
void deal() {
  static unsigned warps[kMost / kLanes];
  unsigned* const end = warps + (size + kLanes - 1) / kLanes;
  std::iota(warps, end, 0);
  std::shuffle(warps, end, chance);
  ready.clear();
  for (const unsigned* warp = warps; warp != end; ++warp) {
    for (unsigned i = *warp * kLanes; i < std::min(size, (*warp + 1) * kLanes); ++i) ready.push_back(i);
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
    if (&meeting == &of_block) {
      deal();  // no other thread can be ready
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
  const auto of_this_library = [](dl_phdr_info* info, size_t, void*) {
    const auto own = reinterpret_cast<ElfW(Addr)>(&fibers);
    bool here = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const ElfW(Phdr)& part = info->dlpi_phdr[i];
      const ElfW(Addr) begin = info->dlpi_addr + part.p_vaddr;
      if (part.p_type == PT_LOAD && own >= begin && own < begin + part.p_memsz) here = true;
      if (part.p_type == PT_TLS) bytes = part.p_memsz;
    }
    if (here && info->dlpi_tls_data) std::memset(info->dlpi_tls_data, 0xff, bytes);
    return int(here);
  };
  dl_iterate_phdr(of_this_library, nullptr);
}

void run_block(unsigned block) {
  blockIdx.x = block;
  ended = 0;
  spoil_shared();
  deal();
  if (!_setjmp(host)) leave();

  // No thread can continue: all are finished, or some wait for others that never arrive.
  if (!failure.empty() || ended == size) return;
  for (const Meeting& meeting : of_warps) {
    if (!meeting.waiting.empty()) {
      failure = "lanes wait for others of their mask that do not come: " + std::string(meeting.place.file) + ":" +
          std::to_string(meeting.place.line);
      return;
    }
  }
  failure = std::to_string(of_block.waiting.size()) + " of " + std::to_string(size) + " threads wait at a barrier: " +
      of_block.place.file + ":" + std::to_string(of_block.place.line);
}

// After a failure the threads are not continued.
void forget() {
  for (Fiber& fiber : fibers) fiber.born = false;
  of_block.waiting.clear();
  for (Meeting& meeting : of_warps) meeting.waiting.clear();
}

}  // namespace

bool running() { return inside; }

void fail(const char* what, Place place) {
  failure = std::string(what) + ": " + place.file + ":" + std::to_string(place.line) + ", block " +
      std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x);
  _longjmp(host, 1);
}

void meet_block(Place place) { meet(of_block, size, 0, place); }

const uint64_t* meet_warp(unsigned mask, uint64_t value, Place place) {
  const unsigned lane = threadIdx.x % kLanes;
  if (!(mask >> lane & 1)) fail("a lane is not in the mask that it gives", place);
  Meeting& warp = of_warps[threadIdx.x / kLanes];
  uint64_t* const values = warp.values[(warp.round + 1) % 2];
  values[lane] = value;
  meet(warp, unsigned(__builtin_popcount(mask)), mask, place);
  return values;
}

const char* run(int64_t blocks, int threads, const std::function<void()>& kernel) {
  failure.clear();
  if (blocks < 1 || blocks > INT32_MAX || threads < 1 || threads > int(kMost)) return "invalid configuration argument";
  size = unsigned(threads);
  body = &kernel;
  for (unsigned i = 0; i < size; ++i) {
    if (!fibers[i].born) bear(i);
  }

  // The order of blocks must not matter either.
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), chance);
  inside = true;
  for (size_t i = 0; i < order.size() && failure.empty(); ++i) run_block(order[i]);
  inside = false;
  if (failure.empty()) return nullptr;
  forget();
  return failure.c_str();
}

}  // namespace emulation
