// Loops over independent tasks on XLA's own thread pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "xla/ffi/api/ffi.h"

extern "C" {
// Threads that a kernel uses at most, the caller included; 0 for as many as XLA's pool has.
__attribute__((visibility("default"))) void jaxkv_set_threads(int threads);
}

namespace jaxkv {

int64_t thread_count(xla::ffi::ThreadPool& pool);

// Calls task(0) .. task(count - 1), each once, in any order and on any thread, the caller's included; returns when all
// have returned. A helper that the pool has not started yet is not waited for, so a busy pool costs no more than its
// help.
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const std::function<void(int64_t)>& task);

// What has to be done before any task of a loop: in parts, by whichever threads come first. So the others are called while
// it has begun already, and nobody waits for one that does not come.
class Groundwork {
 public:
  Groundwork(int64_t parts, std::function<void(int64_t part)> task) : parts_(parts), task_(std::move(task)) {}

  // Returns when all of it is done; every task of the loop calls this first.
  void finish();

 private:
  int64_t parts_;
  std::function<void(int64_t)> task_;
  std::atomic<int64_t> next_{0}, done_{0};
};

// This thread's scratch of at least so many floats, aligned to 64 bytes; what it held is lost at the next call from the
// same `Slot`.
enum class Slot { kInput, kTask };
float* thread_scratch(Slot slot, int64_t floats);

}  // namespace jaxkv
