// zeros: an array of zeros on huge pages, where the system has them. Attention reads a pool's pages in no order, and on
// small ones of memory it waits for the translation of addresses about as long as for the keys.

#include <algorithm>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "operands.h"
#include "parallel.h"

namespace jaxkv {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Asks for huge pages in what of the array has not been touched; they are given when it first is.
void ask_for_huge_pages([[maybe_unused]] char* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto begin = reinterpret_cast<uintptr_t>(data), page = static_cast<uintptr_t>(kHugePage);
  const uintptr_t first = (begin + page - 1) / page * page,
                  last = (begin + static_cast<uintptr_t>(bytes)) / page * page;
  // A system without them says no, and the array is as good on small ones.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

ffi::Error zeros(ffi::ThreadPool pool, ffi::Result<ffi::AnyBuffer> out) {
  char* data = static_cast<char*>(out->untyped_data());
  const auto bytes = static_cast<int64_t>(out->size_bytes());
  ask_for_huge_pages(data, bytes);
  parallel_for(pool, (bytes + kHugePage - 1) / kHugePage, [&](int64_t part) {
    std::memset(data + part * kHugePage, 0, static_cast<size_t>(std::min(kHugePage, bytes - part * kHugePage)));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_zeros(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_zeros, jaxkv::zeros,
                              xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Ret<xla::ffi::AnyBuffer>());
