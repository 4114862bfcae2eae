// argmax: the most likely token of every row.

#include <limits>

#include "operands.h"
#include "parallel.h"

namespace jaxkv {
namespace {

// scores f32 [rows, vocab] -> i32 [rows], -1 where no score is above minus infinity.
ffi::Error argmax(ffi::ThreadPool pool, ffi::AnyBuffer scores, ffi::Result<ffi::AnyBuffer> out) {
  Checker check("argmax");
  if (!check.shape("scores", scores, {kAny, kAny}) || !check.dtype("scores", scores, ffi::DataType::F32) ||
      !check.shape("result", *out, {scores.dimensions()[0]}) || !check.dtype("result", *out, ffi::DataType::S32) ||
      !check.require(scores.dimensions()[1] > 0, "scores have no columns")) {
    return check.error();
  }
  const int64_t columns = scores.dimensions()[1];
  const auto* from = static_cast<const float*>(scores.untyped_data());
  auto* to = static_cast<int32_t*>(out->untyped_data());
  parallel_for(pool, scores.dimensions()[0], [&](int64_t row) {
    float best = -std::numeric_limits<float>::infinity();
    to[row] = static_cast<int32_t>(kernels().argmax(from + row * columns, columns, &best));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_argmax(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_argmax, jaxkv::argmax,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
