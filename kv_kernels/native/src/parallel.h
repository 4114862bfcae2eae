// Loops over independent tasks on XLA's own thread pool.
#pragma once

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

// This thread's scratch of at least so many floats, aligned to 64 bytes; what it held is lost at the next call from the
// same `Slot`.
enum class Slot { kInput, kTask };
float* thread_scratch(Slot slot, int64_t floats);

}  // namespace jaxkv
