#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

namespace jaxkv {
namespace {

std::atomic<int> thread_limit{0};

constexpr int kSpins = 200;  // some microseconds; after them the caller gives up its core between looks

inline void relax() {
#ifdef JAXKV_X86
  __builtin_ia32_pause();
#endif
}

// Tasks are cut in as many runs as there are threads. A thread does its own run first and then helps with the others, so
// that loops of one shape find on each core what the last of them left there.
struct Loop {
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
  };

  std::vector<Run> runs;
  std::atomic<int64_t> done{0};
  const std::function<void(int64_t)>* task;  // the caller's; not touched once all tasks are taken

  Loop(int64_t count, int64_t threads, const std::function<void(int64_t)>* call)
      : runs(static_cast<size_t>(threads)), task(call) {
    for (int64_t i = 0; i < threads; ++i) {
      runs[static_cast<size_t>(i)].next = count * i / threads;
      runs[static_cast<size_t>(i)].end = count * (i + 1) / threads;
    }
  }

  void work(size_t thread) {
    for (size_t offset = 0; offset < runs.size(); ++offset) {
      Run& run = runs[(thread + offset) % runs.size()];
      for (int64_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;) {
        (*task)(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  }
};

struct Scratch {
  float* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(memory); }
};

}  // namespace

int64_t thread_count(xla::ffi::ThreadPool& pool) {
  const int64_t limit = thread_limit.load(std::memory_order_relaxed);
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  return limit > 0 ? std::min(limit, threads) : threads;
}

void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const std::function<void(int64_t)>& task) {
  const int64_t threads = std::min(count, thread_count(pool));
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  // Shared, since a helper may start after this call has returned, to find nothing left.
  const auto loop = std::make_shared<Loop>(count, threads, &task);
  for (int64_t helper = 1; helper < threads; ++helper)
    pool.Schedule([loop, helper] { loop->work(static_cast<size_t>(helper)); });
  loop->work(0);
  for (int spins = 0; loop->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

float* thread_scratch(Slot slot, int64_t floats) {
  thread_local Scratch slots[2];
  Scratch& scratch = slots[static_cast<int>(slot)];
  if (scratch.size < floats) {
    std::free(scratch.memory);
    scratch.size = (floats + 1023) / 1024 * 1024;
    scratch.memory = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(scratch.size) * sizeof(float)));
  }
  return scratch.memory;
}

}  // namespace jaxkv

void jaxkv_set_threads(int threads) { jaxkv::thread_limit.store(threads, std::memory_order_relaxed); }
