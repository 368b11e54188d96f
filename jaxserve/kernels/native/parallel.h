// Division of a call's work over XLA's own thread pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

constexpr int64_t kWorkPerThread = 500'000;  // multiplications; below it waking a thread costs more than it saves

// Work of one call in items that threads share out through counters. Threads that XLA starts late may outlive the call,
// so they own this together and touch nothing else once the items have run out.
struct Shared {
  int64_t items = 0;
  std::atomic<int64_t> next{0}, done{0};
};

// Runs the job on this thread and as many of the pool's as its work is worth. This thread could do all of it, so that
// a pool whose threads are all busy, or waiting like this one, delays nothing.
template <typename Job>
void run(const std::shared_ptr<Job>& job, int64_t work, xla::ffi::ThreadPool& pool) {
  const int64_t threads = std::min({static_cast<int64_t>(pool.num_threads()), job->items, 1 + work / kWorkPerThread});
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([job] { job->work(); });
  job->work();
  while (job->done.load(std::memory_order_acquire) < job->items) std::this_thread::yield();
}

// Uninitialised memory on a cache line.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : memory_(new char[bytes + 64]) {}
  void* get() const { return memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64) % 64; }

 private:
  std::unique_ptr<char[]> memory_;
};

}  // namespace jaxserve
