#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
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

void wait_for(const std::atomic<int64_t>& done, int64_t count) {
  for (int spins = 0; done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
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

// A loop that a thread is to help with, and which of the loop's threads it is then.
struct Invitation {
  std::shared_ptr<Loop> loop;  // shared, since a helper may start after the call has returned, to find nothing left
  size_t thread;
};

// Where a thread that has helped waits for the next loop. The pool takes some microseconds to wake one, and a step has
// hundreds of loops.
class alignas(64) Seat {
 public:
  // The next invitation; null where none comes for a while.
  std::unique_ptr<Invitation> wait() {
    offer_.store(&waiting, std::memory_order_relaxed);
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    for (int spins = 0; offer_.load(std::memory_order_relaxed) == &waiting; ++spins) {
      if (spins < kSpins) {
        relax();
      } else if (std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      } else {
        break;
      }
    }
    Invitation* offered = offer_.exchange(nullptr, std::memory_order_acquire);
    return std::unique_ptr<Invitation>(offered == &waiting ? nullptr : offered);
  }

  // Whether a thread that waits here took it.
  bool invite(std::unique_ptr<Invitation>& invitation) {
    Invitation* expected = &waiting;
    if (offer_.load(std::memory_order_relaxed) != expected ||
        !offer_.compare_exchange_strong(expected, invitation.get(), std::memory_order_release,
                                        std::memory_order_relaxed)) {
      return false;
    }
    invitation.release();
    return true;
  }

 private:
  static inline Invitation waiting;
  static constexpr std::chrono::microseconds kPatience{100};

  std::atomic<Invitation*> offer_{nullptr};
};

constexpr size_t kSeats = 256;
constexpr int kMostLoops = 256;  // after so many a thread looks what else the pool has for it
Seat seats[kSeats];
std::atomic<size_t> seats_taken{0};

// The calling thread's own; null where there are more threads than seats.
Seat* own_seat() {
  thread_local const size_t number = seats_taken.fetch_add(1, std::memory_order_relaxed);
  return number < kSeats ? &seats[number] : nullptr;
}

// What a thread of the pool does.
void help(std::unique_ptr<Invitation> invitation) {
  Seat* seat = own_seat();
  for (int loops = 0; invitation != nullptr; ++loops) {
    invitation->loop->work(invitation->thread);
    invitation = seat == nullptr || loops == kMostLoops ? nullptr : seat->wait();
  }
}

void invite(xla::ffi::ThreadPool& pool, std::unique_ptr<Invitation> invitation) {
  const size_t taken = std::min(seats_taken.load(std::memory_order_relaxed), kSeats);
  for (size_t i = 0; i < taken; ++i)
    if (seats[i].invite(invitation)) return;
  pool.Schedule([raw = invitation.release()] { help(std::unique_ptr<Invitation>(raw)); });
}

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
  const auto loop = std::make_shared<Loop>(count, threads, &task);
  for (int64_t helper = 1; helper < threads; ++helper)
    invite(pool, std::make_unique<Invitation>(Invitation{loop, static_cast<size_t>(helper)}));
  loop->work(0);
  wait_for(loop->done, count);
}

void Groundwork::finish() {
  if (done_.load(std::memory_order_acquire) >= parts_) return;
  for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < parts_;) {
    task_(i);
    done_.fetch_add(1, std::memory_order_release);
  }
  wait_for(done_, parts_);
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
