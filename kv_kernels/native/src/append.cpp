// append_kv: rows of this step into the pools, in place.

#include <cstring>

#include "operands.h"
#include "parallel.h"

namespace jaxkv {
namespace {

void write_rows(const ffi::AnyBuffer& fresh, Element fresh_type, const int32_t* slots, int64_t num_slots,
                Element pool_type, void* pool) {
  const int64_t tokens = fresh.dimensions()[0], features = fresh.dimensions()[1] * fresh.dimensions()[2];
  const char* from = static_cast<const char*>(fresh.untyped_data());
  const int64_t from_bytes = features * element_size(fresh_type), to_bytes = features * element_size(pool_type);
  float* wide = fresh_type == pool_type ? nullptr : thread_scratch(Slot::kTask, features);
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t slot = slots[token];
    if (slot < 0 || slot >= num_slots) continue;
    char* to = static_cast<char*>(pool) + slot * to_bytes;
    if (wide == nullptr) {
      std::memcpy(to, from + token * from_bytes, static_cast<size_t>(to_bytes));
    } else {
      kernels().widen(from + token * from_bytes, fresh_type, features, wide);
      kernels().narrow(wide, features, pool_type, to);
    }
  }
}

// k_new, v_new [tokens, kv_heads, head_dim]; slots i32 [tokens], those outside the pool write nothing; pools
// [pages, tokens_per_page, kv_heads, head_dim], each the same buffer as the result of its name.
ffi::Error append(ffi::AnyBuffer k_new, ffi::AnyBuffer v_new, ffi::AnyBuffer slots, ffi::AnyBuffer k_pool,
                  ffi::AnyBuffer v_pool, ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out) {
  Checker check("append_kv");
  Element fresh_type, pool_type;
  if (!check.shape("k_pool", k_pool, {kAny, kAny, kAny, kAny}) || !check.floating("k_pool", k_pool, &pool_type)) {
    return check.error();
  }
  const auto sizes = k_pool.dimensions();
  if (!check.shape("v_pool", v_pool, {sizes[0], sizes[1], sizes[2], sizes[3]}) ||
      !check.dtype("v_pool", v_pool, k_pool.element_type()) ||
      !check.shape("k_new", k_new, {kAny, sizes[2], sizes[3]}) || !check.floating("k_new", k_new, &fresh_type) ||
      !check.shape("v_new", v_new, {k_new.dimensions()[0], sizes[2], sizes[3]}) ||
      !check.dtype("v_new", v_new, k_new.element_type()) || !check.shape("slots", slots, {k_new.dimensions()[0]}) ||
      !check.dtype("slots", slots, ffi::DataType::S32) ||
      !check.require(k_pool.untyped_data() == k_out->untyped_data() && v_pool.untyped_data() == v_out->untyped_data(),
                     "a pool is not the same buffer as its result: alias operands 3 and 4 to results 0 and 1")) {
    return check.error();
  }
  const auto* where = static_cast<const int32_t*>(slots.untyped_data());
  write_rows(k_new, fresh_type, where, sizes[0] * sizes[1], pool_type, k_out->untyped_data());
  write_rows(v_new, fresh_type, where, sizes[0] * sizes[1], pool_type, v_out->untyped_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_append_kv(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_append_kv, jaxkv::append,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
