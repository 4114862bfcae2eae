// embed: rows of a matrix by token id, unpacked to float32.

#include <algorithm>

#include "operands.h"

namespace jaxkv {
namespace {

// ids i32 [tokens], layer i32 [] (0), the parts of a weight [vocab, hidden] -> f32 [tokens, hidden]. An id out of range
// is clamped.
ffi::Error embed(ffi::AnyBuffer ids, ffi::AnyBuffer layer, ffi::RemainingArgs parts,
                 ffi::Result<ffi::AnyBuffer> out, std::string_view kind) {
  Checker check("embed");
  PartReader reader(check, layer, parts);
  const WeightView weight = reader.weight(kind);
  reader.require_all_read();
  if (check.failed()) return check.error();
  if (!check.shape("ids", ids, {kAny}) || !check.dtype("ids", ids, ffi::DataType::S32) ||
      !check.shape("result", *out, {ids.dimensions()[0], weight.in_features}) ||
      !check.dtype("result", *out, ffi::DataType::F32) ||
      !check.require(weight.out_features > 0, "the weight has no rows")) {
    return check.error();
  }
  const auto* rows = static_cast<const int32_t*>(ids.untyped_data());
  auto* to = static_cast<float*>(out->untyped_data());
  for (int64_t token = 0; token < ids.dimensions()[0]; ++token) {
    const int64_t row = std::clamp<int64_t>(rows[token], 0, weight.out_features - 1);
    kernels().unpack_row(weight, row, to + token * weight.in_features);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_embed(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_embed, jaxkv::embed,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("kind"));
