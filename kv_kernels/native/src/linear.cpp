// linear: activations times one matrix of a stack, in tasks of some outputs for a block of tokens.

#include <algorithm>

#include "operands.h"
#include "parallel.h"

namespace jaxkv {
namespace {

constexpr int64_t kTasksPerThread = 6;

// x [tokens, in] of any float type to the panels that `product` reads.
void pack(const void* x, Element type, int64_t tokens, const Product& p, float* packed) {
  const int64_t in = p.weight.in_features, stride = p.panel + kStridePadding;
  for (int64_t panel = 0; panel < p.panels; ++panel) {
    const int64_t first = panel * p.panel, count = std::min(in - first, p.panel);
    for (int64_t token = 0; token < tokens; ++token) {
      float* to = packed + (panel * tokens + token) * stride;
      kernels().widen(static_cast<const char*>(x) + (token * in + first) * element_size(type), type, count, to);
      std::fill(to + count, to + p.panel, 0.0f);
    }
  }
}

// x [tokens, in], layer i32 [], the parts of a weight [out, in] or [layers, out, in] -> [tokens, out].
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer layer, ffi::RemainingArgs parts,
                  ffi::Result<ffi::AnyBuffer> out, std::string_view kind) {
  Checker check("linear");
  Product p{};
  p.weight = checked_weight(check, kind, layer, parts);
  if (check.failed()) return check.error();
  Element x_type;
  if (!check.shape("x", x, {kAny, p.weight.in_features}) || !check.floating("x", x, &x_type) ||
      !check.shape("result", *out, {x.dimensions()[0], p.weight.out_features}) ||
      !check.floating("result", *out, &p.out_type)) {
    return check.error();
  }
  p.tokens = x.dimensions()[0];
  p.panel = panel_length(p.weight.in_features);
  p.panels = panel_count(p.weight.in_features);
  p.out = out->untyped_data();
  const int64_t outputs = p.weight.out_features;
  if (p.tokens == 0 || outputs == 0) return ffi::Error::Success();
  float* packed = thread_scratch(Slot::kInput, p.panels * p.tokens * (p.panel + kStridePadding));
  pack(x.untyped_data(), x_type, p.tokens, p, packed);
  p.x = packed;

  const int64_t token_blocks = (p.tokens + kTokenBlock - 1) / kTokenBlock;
  const int64_t wanted = std::max<int64_t>(1, kTasksPerThread * thread_count(pool) / token_blocks);
  const int64_t even = (outputs / wanted + kRowGroup - 1) / kRowGroup * kRowGroup;
  const int64_t chunk = std::clamp<int64_t>(even, 4 * kRowGroup, 16 * kOutputBlock);
  const int64_t chunks = (outputs + chunk - 1) / chunk;
  const Kernels& level = kernels();
  parallel_for(pool, token_blocks * chunks, [&](int64_t task) {
    const int64_t block = task / chunks, first_output = task % chunks * chunk;
    level.product(p, p.tokens * block / token_blocks, p.tokens * (block + 1) / token_blocks, first_output,
                  std::min(first_output + chunk, outputs));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_linear(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_linear, jaxkv::linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("kind"));
