// append_kv and what else changes the pools, always in place.

#include "append.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace jaxkv {
namespace {

constexpr int64_t kSerialTokens = 32;  // so few are written by the caller: cheaper than waking a thread
constexpr int64_t kTokensPerTask = 16;
constexpr int64_t kSerialPages = 4;

// A pool as the rows it is written by.
struct PoolView {
  char* data;
  Element type;
  int64_t features;  // of a slot: kv_heads times head_dim
  int64_t head_dim;
  int64_t slot_bytes() const { return features * element_size(type); }
};

PoolView view(const ffi::AnyBuffer& pool, Element type) {
  const auto sizes = pool.dimensions();
  return {static_cast<char*>(pool.untyped_data()), type, sizes[2] * sizes[3], sizes[3]};
}

// Tokens [first, last) of `fresh`; each head is turned by its token's angles where cos is given.
void write_tokens(const void* fresh, Element fresh_type, const int32_t* slots, int64_t first, int64_t last,
                  int64_t first_slot, int64_t num_slots, const float* cos, const float* sin, int64_t rotated,
                  const PoolView& pool) {
  const Kernels& level = kernels();
  const int64_t from_bytes = pool.features * element_size(fresh_type);
  const bool as_is = fresh_type == pool.type && cos == nullptr;
  float* wide = as_is ? nullptr : thread_scratch(Slot::kTask, pool.features);
  for (int64_t token = first; token < last; ++token) {
    if (slots[token] < 0 || slots[token] >= num_slots) continue;
    const char* from = static_cast<const char*>(fresh) + token * from_bytes;
    char* to = pool.data + (first_slot + slots[token]) * pool.slot_bytes();
    if (as_is) {
      std::memcpy(to, from, static_cast<size_t>(from_bytes));
      continue;
    }
    level.widen(from, fresh_type, pool.features, wide);
    if (cos != nullptr) {
      for (int64_t head = 0; head < pool.features; head += pool.head_dim)
        level.rotate(cos + token * rotated, sin + token * rotated, rotated, wide + head);
    }
    level.narrow(wide, pool.features, pool.type, to);
  }
}

bool pools_fit(Checker& check, const ffi::AnyBuffer& k_pool, const ffi::AnyBuffer& v_pool, Element* type) {
  if (!check.shape("k_pool", k_pool, {kAny, kAny, kAny, kAny}) || !check.floating("k_pool", k_pool, type)) return false;
  const auto sizes = k_pool.dimensions();
  return check.shape("v_pool", v_pool, {sizes[0], sizes[1], sizes[2], sizes[3]}) &&
         check.dtype("v_pool", v_pool, k_pool.element_type());
}

// k_new, v_new [tokens, kv_heads, head_dim]; slots i32 [tokens], those outside the pool write nothing; pools
// [pages, tokens_per_page, kv_heads, head_dim], each the same buffer as the result of its name.
ffi::Error append(ffi::ThreadPool pool, ffi::AnyBuffer k_new, ffi::AnyBuffer v_new, ffi::AnyBuffer slots,
                  ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool, ffi::Result<ffi::AnyBuffer> k_out,
                  ffi::Result<ffi::AnyBuffer> v_out) {
  Checker check("append_kv");
  if (!check.shape("k_pool", k_pool, {kAny, kAny, kAny, kAny})) return check.error();
  append_tokens(check, pool, k_new, v_new, slots, Attention{}, k_pool.dimensions()[0], k_pool, v_pool, *k_out, *v_out);
  return check.failed() ? check.error() : ffi::Error::Success();
}

}  // namespace

bool prepare_pages(Checker& check, ffi::ThreadPool& pool, const ffi::AnyBuffer& scrub,
                   const ffi::AnyBuffer& copy_sources, const ffi::AnyBuffer& copy_targets, int64_t first_page,
                   int64_t num_pages, const ffi::AnyBuffer& k_pool, const ffi::AnyBuffer& v_pool) {
  Element type;
  if (!pools_fit(check, k_pool, v_pool, &type) || !check.shape("scrub", scrub, {kAny}) ||
      !check.dtype("scrub", scrub, ffi::DataType::S32) || !check.shape("copy_targets", copy_targets, {kAny}) ||
      !check.dtype("copy_targets", copy_targets, ffi::DataType::S32) ||
      !check.shape("copy_sources", copy_sources, {copy_targets.dimensions()[0]}) ||
      !check.dtype("copy_sources", copy_sources, ffi::DataType::S32) ||
      !check.require(first_page >= 0 && num_pages >= 0 && first_page + num_pages <= k_pool.dimensions()[0],
                     "the layer's pages ", first_page, " to ", first_page + num_pages, " are not in pools of ",
                     k_pool.dimensions()[0])) {
    return false;
  }
  const auto* cleared = static_cast<const int32_t*>(scrub.untyped_data());
  const auto* sources = static_cast<const int32_t*>(copy_sources.untyped_data());
  const auto* targets = static_cast<const int32_t*>(copy_targets.untyped_data());
  const int64_t scrubs = scrub.dimensions()[0], copies = copy_targets.dimensions()[0];
  int64_t busy = 0;
  for (int64_t i = 0; i < scrubs; ++i) {
    if (cleared[i] < 0) continue;
    if (!check.index("page to clear", cleared[i], num_pages)) return false;
    ++busy;
  }
  for (int64_t i = 0; i < copies; ++i) {
    if (targets[i] < 0) continue;
    if (!check.index("page to copy to", targets[i], num_pages) || !check.index("page to copy", sources[i], num_pages))
      return false;
    ++busy;
  }
  if (busy == 0) return true;
  const int64_t page_bytes = k_pool.dimensions()[1] * view(k_pool, type).slot_bytes();
  const auto page = [&](const ffi::AnyBuffer& pool_of, int64_t index) {
    return static_cast<char*>(pool_of.untyped_data()) + (first_page + index) * page_bytes;
  };
  const auto clear = [&](int64_t i) {
    if (cleared[i] < 0) return;
    std::memset(page(k_pool, cleared[i]), 0, static_cast<size_t>(page_bytes));
    std::memset(page(v_pool, cleared[i]), 0, static_cast<size_t>(page_bytes));
  };
  if (busy <= kSerialPages) {
    for (int64_t i = 0; i < scrubs; ++i) clear(i);
  } else {
    parallel_for(pool, scrubs, clear);
  }
  for (int64_t i = 0; i < copies; ++i) {
    if (targets[i] < 0) continue;
    std::memmove(page(k_pool, targets[i]), page(k_pool, sources[i]), static_cast<size_t>(page_bytes));
    std::memmove(page(v_pool, targets[i]), page(v_pool, sources[i]), static_cast<size_t>(page_bytes));
  }
  return true;
}

bool append_tokens(Checker& check, ffi::ThreadPool& pool, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
                   const ffi::AnyBuffer& slots, const Attention& a, int64_t num_pages, const ffi::AnyBuffer& k_pool,
                   const ffi::AnyBuffer& v_pool, const ffi::AnyBuffer& k_out, const ffi::AnyBuffer& v_out) {
  Element fresh_type, pool_type;
  if (!pools_fit(check, k_pool, v_pool, &pool_type)) return false;
  const auto sizes = k_pool.dimensions();
  if (!check.shape("k_new", k, {kAny, sizes[2], sizes[3]}) || !check.floating("k_new", k, &fresh_type) ||
      !check.shape("v_new", v, {k.dimensions()[0], sizes[2], sizes[3]}) || !check.dtype("v_new", v, k.element_type()) ||
      !check.shape("slots", slots, {k.dimensions()[0]}) || !check.dtype("slots", slots, ffi::DataType::S32) ||
      !check.require(a.first_page >= 0 && a.first_page + num_pages <= sizes[0], "the layer's pages ", a.first_page,
                     " to ", a.first_page + num_pages, " are not in pools of ", sizes[0]) ||
      !check.require(
          k_pool.untyped_data() == k_out.untyped_data() && v_pool.untyped_data() == v_out.untyped_data(),
          "a pool is not the same buffer as its result: alias the operands k_pool and v_pool to the results")) {
    return false;
  }
  const auto* where = static_cast<const int32_t*>(slots.untyped_data());
  const int64_t tokens = k.dimensions()[0], first_slot = a.first_page * sizes[1], num_slots = num_pages * sizes[1];
  const PoolView k_view = view(k_pool, pool_type), v_view = view(v_pool, pool_type);
  const auto write = [&](int64_t first, int64_t last) {
    write_tokens(k.untyped_data(), fresh_type, where, first, last, first_slot, num_slots, a.cos, a.sin, a.rotated, k_view);
    write_tokens(v.untyped_data(), fresh_type, where, first, last, first_slot, num_slots, nullptr, nullptr, 0, v_view);
  };
  if (tokens <= kSerialTokens) {
    write(0, tokens);
    return true;
  }
  // Two tokens of padding may share a slot, that of the padding page, which nothing reads.
  parallel_for(pool, (tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task) {
    write(task * kTokensPerTask, std::min(tokens, (task + 1) * kTokensPerTask));
  });
  return true;
}

}  // namespace jaxkv

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_append_kv(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_append_kv, jaxkv::append,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
