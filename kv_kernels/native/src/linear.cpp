// linear: activations times one matrix, or several that share them, of a stack of layers, with what stands before and
// after in the same pass: the norm of the activations, biases, a gated activation, a residual.
//
// linear_call.h says how the work is cut in tasks.

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear_call.h"

namespace jaxkv {
namespace {

// A block of results to its place: biases, gate and residual on the way.
void finish(const Call& call, const Matrix& matrix, int64_t first_token, int64_t tokens, int64_t first_output,
            int64_t outputs, float* results, float* gates) {
  const Kernels& level = kernels();
  add_bias(matrix.bias == nullptr ? nullptr : matrix.bias + first_output, tokens, outputs, results);
  alignas(64) float beside[kOutputBlock];
  for (int64_t t = 0; t < tokens; ++t) {
    float* row = results + t * kOutputBlock;
    const int64_t at = ((first_token + t) * matrix.weight.out_features + first_output) * element_size(matrix.out_type);
    if (gates != nullptr) {
      level.gate(call.activation, row, outputs, gates + t * kOutputBlock);
      row = gates + t * kOutputBlock;
    }
    if (call.residual != nullptr) {
      level.widen(static_cast<const char*>(call.residual) + at, matrix.out_type, outputs, beside);
      for (int64_t i = 0; i < outputs; ++i) row[i] += beside[i];
    }
    level.narrow(row, outputs, matrix.out_type, static_cast<char*>(matrix.out) + at);
  }
}

void run_task(const Call& call, const float* packed, int64_t block, int64_t chunk_index) {
  const ProductKernels& products = call.products();
  const int64_t first_token = call.first_token(block), tokens = call.first_token(block + 1) - first_token;
  const bool gated = call.activation != Activation::kNone;
  size_t index = gated ? 1 : call.matrices.size() - 1;
  while (!gated && call.matrices[index].first_chunk > chunk_index) --index;
  const Matrix& matrix = call.matrices[index];
  const int64_t begin = (chunk_index - matrix.first_chunk) * call.chunk;
  const int64_t end = std::min(begin + call.chunk, matrix.weight.out_features);
  if (products.finished_product != nullptr && matrix.out_type == Element::kBF16) {
    const Matrix* gate = gated ? &call.matrices[0] : nullptr;
    const int64_t stride = matrix.weight.out_features, at = first_token * stride * element_size(matrix.out_type);
    const void* residual = call.residual == nullptr ? nullptr : static_cast<const char*>(call.residual) + at;
    const Finish finish{matrix.bias,
                        gate == nullptr ? nullptr : gate->bias,
                        call.activation,
                        residual,
                        static_cast<char*>(matrix.out) + at,
                        stride};
    return products.finished_product(matrix.weight, gate == nullptr ? nullptr : &gate->weight, packed, tokens, begin,
                                     end - begin, finish);
  }
  alignas(64) float results[kTokenBlock * kOutputBlock];
  alignas(64) float gates[kTokenBlock * kOutputBlock];
  for (int64_t first = begin; first < end; first += kOutputBlock) {
    const int64_t outputs = std::min(kOutputBlock, end - first);
    products.product(matrix.weight, packed, tokens, first, outputs, results);
    if (gated) {
      const Matrix& gate = call.matrices[0];
      products.product(gate.weight, packed, tokens, first, outputs, gates);
      add_bias(gate.bias == nullptr ? nullptr : gate.bias + first, tokens, outputs, gates);
    }
    finish(call, matrix, first_token, tokens, first, outputs, results, gated ? gates : nullptr);
  }
}

// The words of a list apart by commas.
std::vector<std::string_view> words(std::string_view list) {
  std::vector<std::string_view> found;
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    found.push_back(list.substr(0, comma));
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return found;
}

// x [rows, in], layer i32 [], used i32 [], then as the attributes say: the norm's weight f32 [in] (norm_eps >= 0), the
// residual [rows, out] (has_residual), and for every one of `kinds` ("q4_1", "dense+bias", apart by commas) a weight
// [out, in] and its bias f32 [out]. Each but the residual may have an axis of layers in front. Gives [rows, out] for every
// weight, or where there is an activation one array, activation(x times the first) * (x times the second); zeros behind
// the first `used` rows.
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer layer, ffi::AnyBuffer used,
                  ffi::RemainingArgs parts, ffi::RemainingRets outs, std::string_view kinds, float norm_eps, bool has_residual,
                  std::string_view activation, bool int8_x) {
  Checker check("linear");
  PartReader reader(check, layer, parts);
  Call call = read_x(check, reader, x, used, norm_eps, int8_x);
  ffi::AnyBuffer residual = x;
  if (has_residual) residual = reader.array("residual");
  const bool gated = !activation.empty();
  if (gated && check.require(activation == "silu" || activation == "gelu_tanh", "activation ", activation,
                             " is not silu or gelu_tanh")) {
    call.activation = activation == "silu" ? Activation::kSilu : Activation::kGeluTanh;
  }
  for (const std::string_view word : words(kinds)) read_matrix(check, reader, word, call);
  reader.require_all_read();
  if (check.failed()) return check.error();
  const size_t results = gated ? 1 : call.matrices.size();
  if (!check.require(!call.matrices.empty(), "no weight is given") ||
      !check.require(!gated || (call.matrices.size() == 2 &&
                                call.matrices[0].weight.out_features == call.matrices[1].weight.out_features),
                     "a gated product takes two weights of one size") ||
      !check.require(outs.size() == results, outs.size(), " results for ", results) ||
      !check.require(!has_residual || results == 1, "a residual goes with one result")) {
    return check.error();
  }
  const WeightView& first = call.matrices[0].weight;
  for (size_t i = 0; i < call.matrices.size(); ++i) {
    Matrix& matrix = call.matrices[i];
    auto out = outs.get<ffi::AnyBuffer>(gated ? 0 : i);
    if (!check.require(matrix.weight.kind == first.kind, "weights that share x are of different kinds") ||
        !check.require(out.has_value(), "a result is not an array") ||
        !check.shape("result", **out, {call.rows, matrix.weight.out_features}) ||
        !check.floating("result", **out, &matrix.out_type)) {
      return check.error();
    }
    matrix.out = (*out)->untyped_data();
  }
  if (has_residual) {
    auto out = outs.get<ffi::AnyBuffer>(0);
    if (!check.shape("residual", residual, {call.rows, call.matrices.back().weight.out_features}) ||
        !check.dtype("residual", residual, (*out)->element_type())) {
      return check.error();
    }
    call.residual = residual.untyped_data();
  }
  for (size_t i = 0; i < results; ++i) {
    const Matrix& matrix = call.matrices[i];
    const int64_t row_bytes = matrix.weight.out_features * element_size(matrix.out_type);
    std::memset(static_cast<char*>(matrix.out) + call.tokens * row_bytes, 0,
                static_cast<size_t>((call.rows - call.tokens) * row_bytes));
  }
  if (call.tokens > 0) {
    cut(pool, call);
    run(pool, call, [&](const float* packed, int64_t block, int64_t chunk) { run_task(call, packed, block, chunk); });
  }
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
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("kinds")
                                  .Attr<float>("norm_eps")
                                  .Attr<bool>("has_residual")
                                  .Attr<std::string_view>("activation")
                                  .Attr<bool>("int8_x"));
