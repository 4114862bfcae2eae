// linear: activations times one matrix, or several that share them, of a stack of layers, with what stands before and
// after in the same pass: the norm of the activations, biases, a gated activation, a residual.
//
// The work is cut in tasks of some outputs for a block of tokens. A block is normalized and packed once for all of them.

#include <algorithm>
#include <vector>

#include "operands.h"
#include "parallel.h"

namespace jaxkv {
namespace {

constexpr int64_t kTasksPerThread = 3;
constexpr int64_t kChunkOutputs = 16;  // a task has a multiple of so many: all levels multiply them in whole groups
static_assert(kChunkOutputs % WeightTile::kRows == 0 && kOutputBlock % WeightTile::kRows == 0);
constexpr int64_t kSerialTokens = 32;  // so few are prepared by the caller: cheaper than waking a thread

struct Matrix {
  WeightView weight;
  const float* bias;  // [out], or null
  void* out;          // [tokens, out]
  Element out_type;
  int64_t first_chunk;  // its first task among those of a token block
};

struct Call {
  const void* x;
  Element x_type;
  int64_t tokens;
  int64_t in_features;
  const float* norm;  // [in], or null
  float eps;
  const void* residual;  // [tokens, out] of the first result's type, or null
  Activation activation;
  std::vector<Matrix> matrices;
  int64_t token_blocks;
  int64_t chunk;   // outputs of a task
  int64_t chunks;  // tasks of a token block

  const ProductKernels& products() const {
    return x_type == Element::kBF16 ? kernels().bf16_products : kernels().products;
  }
  int64_t first_token(int64_t block) const { return tokens * block / token_blocks; }
};

// Tokens [first, last) of x, normalized and packed.
void prepare(const Call& call, int64_t first, int64_t last, float* packed) {
  const Kernels& level = kernels();
  const int64_t in = call.in_features;
  const WeightView& weight = call.matrices[0].weight;
  const bool is_wide = call.x_type == Element::kF32;
  if (call.products().pack_narrow != nullptr && call.x_type == Element::kBF16 && call.norm == nullptr) {
    const char* source = static_cast<const char*>(call.x) + first * in * element_size(call.x_type);
    return call.products().pack_narrow(weight, source, last - first, packed);
  }
  const auto rows = [&](int64_t offset, int64_t count) -> const float* {
    const char* source = static_cast<const char*>(call.x) + (first + offset) * in * element_size(call.x_type);
    if (is_wide && call.norm == nullptr) return reinterpret_cast<const float*>(source);
    float* wide = thread_scratch(Slot::kTask, count * in);
    for (int64_t token = 0; token < count; ++token, source += in * element_size(call.x_type)) {
      float* row = wide + token * in;
      if (!is_wide) level.widen(source, call.x_type, in, row);
      if (call.norm != nullptr)
        level.normalize(is_wide ? reinterpret_cast<const float*>(source) : row, call.norm, in, call.eps, row);
    }
    return wide;
  };
  call.products().pack(weight, rows, last - first, packed);
}

void add_bias(const float* bias, int64_t tokens, int64_t outputs, float* results) {
  if (bias == nullptr) return;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < outputs; ++i) results[t * kOutputBlock + i] += bias[i];
}

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

void run(ffi::ThreadPool& pool, Call& call) {
  const ProductKernels& products = call.products();
  const WeightView& weight = call.matrices[0].weight;
  call.token_blocks = (call.tokens + products.token_block - 1) / products.token_block;
  const int64_t most = (call.tokens + call.token_blocks - 1) / call.token_blocks;
  const int64_t size = (products.packed_size(weight, most) + 15) / 16 * 16;
  float* packed = thread_scratch(Slot::kInput, call.token_blocks * size);
  const auto prepare_block = [&](int64_t block) {
    prepare(call, call.first_token(block), call.first_token(block + 1), packed + block * size);
  };
  if (call.tokens <= kSerialTokens) {
    prepare_block(0);
  } else {
    parallel_for(pool, call.token_blocks, prepare_block);
  }

  int64_t outputs = 0;
  const bool gated = call.activation != Activation::kNone;
  for (const Matrix& matrix : call.matrices) outputs += matrix.weight.out_features;
  if (gated) outputs /= 2;
  const int64_t wanted = std::max<int64_t>(1, kTasksPerThread * thread_count(pool) / call.token_blocks);
  const int64_t even = (outputs / wanted + kChunkOutputs - 1) / kChunkOutputs * kChunkOutputs;
  call.chunk = std::clamp<int64_t>(even, kChunkOutputs, 16 * kOutputBlock);
  call.chunks = 0;
  for (Matrix& matrix : call.matrices) {
    matrix.first_chunk = gated ? 0 : call.chunks;
    call.chunks = matrix.first_chunk + (matrix.weight.out_features + call.chunk - 1) / call.chunk;
  }
  parallel_for(pool, call.token_blocks * call.chunks, [&](int64_t task) {
    const int64_t block = task / call.chunks;
    run_task(call, packed + block * size, block, task % call.chunks);
  });
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

// x [tokens, in], layer i32 [], then as the attributes say: the norm's weight f32 [in] (norm_eps >= 0), the residual
// [tokens, out] (has_residual), and for every one of `kinds` ("q4_1", "dense+bias", apart by commas) a weight [out, in]
// and its bias f32 [out]. Each but the residual may have an axis of layers in front. Gives [tokens, out] for every
// weight, or where there is an activation one array, activation(x times the first) * (x times the second).
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer layer, ffi::RemainingArgs parts,
                  ffi::RemainingRets outs, std::string_view kinds, float norm_eps, bool has_residual,
                  std::string_view activation) {
  Checker check("linear");
  Call call{};
  if (!check.shape("x", x, {kAny, kAny}) || !check.floating("x", x, &call.x_type)) return check.error();
  call.x = x.untyped_data();
  call.tokens = x.dimensions()[0];
  call.in_features = x.dimensions()[1];
  PartReader reader(check, layer, parts);
  if (norm_eps >= 0) {
    call.norm = reader.vector("norm", call.in_features);
    call.eps = norm_eps;
  }
  ffi::AnyBuffer residual = x;
  if (has_residual) residual = reader.array("residual");
  const bool gated = !activation.empty();
  if (gated && check.require(activation == "silu" || activation == "gelu_tanh", "activation ", activation,
                             " is not silu or gelu_tanh")) {
    call.activation = activation == "silu" ? Activation::kSilu : Activation::kGeluTanh;
  }
  for (const std::string_view word : words(kinds)) {
    const std::string_view kind = word.substr(0, word.find('+'));
    Matrix matrix{};
    matrix.weight = reader.weight(kind);
    if (kind.size() != word.size()) matrix.bias = reader.vector("bias", matrix.weight.out_features);
    call.matrices.push_back(matrix);
  }
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
    if (!check.require(matrix.weight.in_features == call.in_features, "x has shape ", x, ", wanted [any, ",
                       matrix.weight.in_features, "]") ||
        !check.require(matrix.weight.kind == first.kind, "weights that share x are of different kinds")) {
      return check.error();
    }
    auto out = outs.get<ffi::AnyBuffer>(gated ? 0 : i);
    if (!check.require(out.has_value(), "a result is not an array") ||
        !check.shape("result", **out, {call.tokens, matrix.weight.out_features}) ||
        !check.floating("result", **out, &matrix.out_type)) {
      return check.error();
    }
    matrix.out = (*out)->untyped_data();
  }
  if (has_residual) {
    auto out = outs.get<ffi::AnyBuffer>(0);
    if (!check.shape("residual", residual, {call.tokens, call.matrices.back().weight.out_features}) ||
        !check.dtype("residual", residual, (*out)->element_type())) {
      return check.error();
    }
    call.residual = residual.untyped_data();
  }
  if (call.tokens > 0) run(pool, call);
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
                                  .RemainingRets()
                                  .Attr<std::string_view>("kinds")
                                  .Attr<float>("norm_eps")
                                  .Attr<bool>("has_residual")
                                  .Attr<std::string_view>("activation"));
