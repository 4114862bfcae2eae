// most_likely: which output of a matrix is the largest for every token, of the same numbers that `linear` would write.
//
// Every task keeps the best of its own outputs, and nothing else of them leaves a cache.

#include <algorithm>
#include <limits>

#include "linear_call.h"

namespace jaxkv {
namespace {

struct Best {
  float value = -std::numeric_limits<float>::infinity();
  int64_t output = -1;
};

// The best of a task's outputs for every token of its block goes to `best`.
void run_task(const Call& call, const float* packed, int64_t block, int64_t chunk_index, Best* best) {
  const Kernels& level = kernels();
  const Matrix& matrix = call.matrices[0];
  const int64_t tokens = call.first_token(block + 1) - call.first_token(block);
  const int64_t begin = chunk_index * call.chunk, end = std::min(begin + call.chunk, matrix.weight.out_features);
  alignas(64) float results[kTokenBlock * kOutputBlock];
  for (int64_t first = begin; first < end; first += kOutputBlock) {
    const int64_t outputs = std::min(kOutputBlock, end - first);
    call.products().product(matrix.weight, packed, tokens, first, outputs, results);
    add_bias(matrix.bias == nullptr ? nullptr : matrix.bias + first, tokens, outputs, results);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t above = level.argmax(results + t * kOutputBlock, outputs, &best[t].value);
      if (above >= 0) best[t].output = first + above;
    }
  }
}

// x [rows, in], layer i32 [], used i32 [], the norm's weight f32 [in] where norm_eps >= 0, a weight [out, in] as `kind`
// says, and its bias f32 [out] where that says so: see `linear`. Gives i32 [rows], -1 where no output is above minus
// infinity and behind the first `used` rows.
ffi::Error most_likely(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer layer, ffi::AnyBuffer used,
                       ffi::RemainingArgs parts, ffi::Result<ffi::AnyBuffer> out, std::string_view kind, float norm_eps,
                       bool int8_x) {
  Checker check("most_likely");
  PartReader reader(check, layer, parts);
  Call call = read_x(check, reader, x, used, norm_eps, int8_x);
  read_matrix(check, reader, kind, call);
  reader.require_all_read();
  if (check.failed() ||
      !check.require(call.matrices[0].weight.out_features > 0, "weight has no outputs") ||
      !check.shape("result", *out, {call.rows}) || !check.dtype("result", *out, ffi::DataType::S32)) {
    return check.error();
  }
  auto* to = static_cast<int32_t*>(out->untyped_data());
  std::fill(to + call.tokens, to + call.rows, -1);
  if (call.tokens == 0) return ffi::Error::Success();
  cut(pool, call);
  // By chunk, and for every chunk by token.
  std::vector<Best> best(static_cast<size_t>(call.chunks * call.tokens));
  run(pool, call, [&](const float* packed, int64_t block, int64_t chunk) {
    run_task(call, packed, block, chunk, best.data() + chunk * call.tokens + call.first_token(block));
  });
  for (int64_t token = 0; token < call.tokens; ++token) {
    Best first;
    for (int64_t chunk = 0; chunk < call.chunks; ++chunk) {
      const Best& each = best[static_cast<size_t>(chunk * call.tokens + token)];
      if (each.value > first.value) first = each;
    }
    to[token] = static_cast<int32_t>(first.output);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_most_likely(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_most_likely, jaxkv::most_likely,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("kind")
                                  .Attr<float>("norm_eps")
                                  .Attr<bool>("int8_x"));
