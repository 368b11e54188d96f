// Division of a call's work among the library's own threads, because XLA's pool may have a single thread (planning/resolve.py).

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace jaxserve {

constexpr int64_t kWorkPerThread = 100'000;  // multiplications; below it sharing costs more than it saves
constexpr std::chrono::microseconds kLinger{60};  // time that a helper polls before it sleeps; most pauses between a step's calls are shorter
constexpr int kPatience = 20;  // approximate microseconds after which a caller that waits for the last items yields its processor

// A range of neighbouring items. Its own thread takes items from the front, and so reads memory in order. Threads that have
// finished their own range take items from the back.
class Stretch {
 public:
  void set(int64_t first, int64_t end) { left_ = pack(first, end); }

  // Removes and returns the next item from the front or the back, or returns -1 if none is left.
  int64_t take(bool front) {
    uint64_t left = left_.load();
    while (first_of(left) < end_of(left)) {
      const int64_t first = first_of(left), end = end_of(left);
      if (left_.compare_exchange_weak(left, front ? pack(first + 1, end) : pack(first, end - 1))) return front ? first : end - 1;
    }
    return -1;
  }

  bool has(int64_t item) const {
    const uint64_t left = left_.load();
    return first_of(left) <= item && item < end_of(left);
  }

 private:
  std::atomic<uint64_t> left_{0};
  char padding_[56];  // fills a cache line; alignment would make allocations slower

  static uint64_t pack(int64_t first, int64_t end) { return static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(first); }
  static int64_t first_of(uint64_t left) { return static_cast<uint32_t>(left); }
  static int64_t end_of(uint64_t left) { return static_cast<int64_t>(left >> 32); }
};

// A job: the work of one call as items, with a range of items for each thread. A thread may start late and outlive the call.
// Therefore all threads share the ownership of the job, and access nothing else once no item is left.
struct Shared {
  static constexpr int64_t kStretches = 8;  // maximum number of ranges; further threads share them

  virtual ~Shared() = default;
  virtual void work() = 0;  // computes items until none is left

  void divide(int64_t threads) {
    number = std::min(threads, kStretches);
    for (int64_t i = 0; i < number; ++i) stretches[i].set(items * i / number, items * (i + 1) / number);
  }

  int64_t items = 0;
  int64_t number = 0;  // of stretches
  Stretch stretches[kStretches];
  std::atomic<int64_t> joined{0}, done{0};
};

// Pauses for about a microsecond.
inline void pause() {
  for (int i = 0; i < 32; ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
}

// The maximum number of threads that compute at once, set by jaxserve_set_processors when the library is loaded.
inline std::atomic<int64_t> processor_count{std::max<int64_t>(1, std::thread::hardware_concurrency())};

inline int64_t processors() { return processor_count.load(std::memory_order_relaxed); }

// An iterator over the items that one thread computes.
class Items {
 public:
  explicit Items(Shared& job) : job_(job), home_(job.joined.fetch_add(1)) { take(); }

  bool more() const { return now_ >= 0; }
  int64_t now() const { return now_; }
  int64_t after() const { return after_; }  // the next item, most likely, so that it can be prefetched; -1 if unknown
  bool knows_after() const { return after_ >= 0; }

  void advance() {
    job_.done.fetch_add(1, std::memory_order_release);
    take();
  }

 private:
  Shared& job_;
  const int64_t home_;
  int64_t now_ = -1, after_ = -1;

  void take() {
    now_ = -1;
    for (int64_t i = 0; i < job_.number && now_ < 0; ++i) {
      Stretch& stretch = job_.stretches[(home_ + i) % job_.number];
      now_ = stretch.take(i == 0);
      after_ = i == 0 ? now_ + 1 : now_ - 1;
      if (!stretch.has(after_)) after_ = -1;
    }
  }
};

// Threads that take part in calls, and poll for the next call during kLinger before they sleep. Waking a thread takes longer than
// most calls: up to several milliseconds if it last ran on the processor of the caller. But a thread that polls occupies a
// processor. The thread that prepares the next step then shares the processor of the caller, and the two take turns.
class Helpers {
 public:
  // The helpers of the process. They are never destroyed, because some may still poll when the process ends.
  static Helpers& all() {
    static Helpers* const helpers = new Helpers;
    return *helpers;
  }

  // Offers the job to `count` threads.
  void offer(const std::shared_ptr<Shared>& job, int64_t count) {
    const std::lock_guard lock(mutex_);
    offers_.insert(offers_.end(), static_cast<size_t>(count), job);
    offered_.fetch_add(1, std::memory_order_release);
    for (; number_ < count; ++number_) std::thread([this] { help(); }).detach();
    if (sleeping_ > 0) came_.notify_all();
  }

  // Withdraws the offers of a job that no thread has accepted.
  void withdraw(const Shared* job) {
    const std::lock_guard lock(mutex_);
    const auto same = [job](const std::shared_ptr<Shared>& offer) { return offer.get() == job; };
    offers_.erase(std::remove_if(offers_.begin(), offers_.end(), same), offers_.end());
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::shared_ptr<Shared>> offers_;
  int64_t number_ = 0, sleeping_ = 0;  // of threads
  std::atomic<uint64_t> offered_{0};

  void help() {
    for (;;) {
      const uint64_t seen = offered_.load(std::memory_order_acquire);
      while (const auto job = take()) job->work();
      const auto since = std::chrono::steady_clock::now();
      while (offered_.load(std::memory_order_acquire) == seen) {
        if (std::chrono::steady_clock::now() - since > kLinger) sleep();
        pause();
        std::this_thread::yield();
      }
    }
  }

  std::shared_ptr<Shared> take() {
    const std::lock_guard lock(mutex_);
    if (offers_.empty()) return nullptr;
    auto job = std::move(offers_.front());
    offers_.pop_front();
    return job;
  }

  void sleep() {
    std::unique_lock lock(mutex_);
    ++sleeping_;
    came_.wait(lock, [this] { return !offers_.empty(); });
    --sleeping_;
  }
};

// Runs the job on this thread and on as many helpers as its `work` (in multiplications) justifies. This thread can compute all
// items, so a late helper delays nothing.
inline void run(const std::shared_ptr<Shared>& job, int64_t work) {
  const int64_t threads = std::min({processors(), job->items, 1 + work / kWorkPerThread});
  job->divide(threads);
  if (threads > 1) Helpers::all().offer(job, threads - 1);
  job->work();
  if (threads > 1) Helpers::all().withdraw(job.get());
  for (int waited = 1; job->done.load(std::memory_order_acquire) < job->items; ++waited) {
    pause();
    if (waited % kPatience == 0) std::this_thread::yield();  // a helper may be waiting for this processor
  }
}

// Uninitialised memory that begins on a cache line.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : memory_(new char[bytes + 64]) {}
  void* get() const { return memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64) % 64; }

 private:
  std::unique_ptr<char[]> memory_;
};

}  // namespace jaxserve
