// normalize: the norm of rows, where it does not stand before a product.

#include <algorithm>

#include "operands.h"
#include "parallel.h"

namespace jaxkv {
namespace {

constexpr int64_t kTaskNumbers = 16384;  // of a task, about

// x [rows, features], layer i32 [], the norm's weight f32 [features] or [layers, features] -> the same shape and dtype.
ffi::Error normalize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer layer, ffi::RemainingArgs parts,
                     ffi::Result<ffi::AnyBuffer> out, float norm_eps) {
  Checker check("normalize");
  PartReader reader(check, layer, parts);
  Element type;
  if (!check.shape("x", x, {kAny, kAny}) || !check.floating("x", x, &type)) return check.error();
  const int64_t rows = x.dimensions()[0], features = x.dimensions()[1];
  const float* weight = reader.vector("norm", features);
  reader.require_all_read();
  if (check.failed() || !check.shape("result", *out, {rows, features}) ||
      !check.dtype("result", *out, x.element_type())) {
    return check.error();
  }
  const auto* from = static_cast<const char*>(x.untyped_data());
  auto* to = static_cast<char*>(out->untyped_data());
  const int64_t row_bytes = features * element_size(type);
  const int64_t tasks = std::clamp<int64_t>(rows * features / kTaskNumbers, 1, std::max<int64_t>(1, rows));
  parallel_for(pool, tasks, [&](int64_t task) {
    const Kernels& level = kernels();
    float* wide = thread_scratch(Slot::kTask, features);
    for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; ++row) {
      level.widen(from + row * row_bytes, type, features, wide);
      level.normalize(wide, weight, features, norm_eps, wide);
      level.narrow(wide, features, type, to + row * row_bytes);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_normalize(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_normalize, jaxkv::normalize,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("norm_eps"));
