#include "linear_call.h"

#include <algorithm>

namespace jaxkv {
namespace {

constexpr int64_t kTasksPerThread = 3;
constexpr int64_t kChunkOutputs = 16;  // a task has a multiple of so many: all levels multiply them in whole groups
static_assert(kChunkOutputs % WeightTile::kRows == 0 && kOutputBlock % WeightTile::kRows == 0);
constexpr int64_t kSerialTokens = 8;  // so few are prepared by one thread

// A part of tokens [first, last) of x, normalized and packed.
void prepare(const Call& call, int64_t first, int64_t last, Part part, float* packed) {
  const Kernels& level = kernels();
  const int64_t in = call.in_features;
  const WeightView& weight = call.matrices[0].weight;
  const bool is_wide = call.x_type == Element::kF32;
  if (call.products().pack_narrow != nullptr && call.x_type == Element::kBF16 && call.norm == nullptr) {
    const char* source = static_cast<const char*>(call.x) + first * in * element_size(call.x_type);
    return call.products().pack_narrow(weight, source, last - first, part, packed);
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
  call.products().pack(weight, rows, last - first, part, packed);
}

}  // namespace

Call read_x(Checker& check, PartReader& reader, const ffi::AnyBuffer& x, const ffi::AnyBuffer& used, float norm_eps,
            bool int8_x) {
  Call call{};
  call.int8_x = int8_x;
  if (!check.shape("x", x, {kAny, kAny}) || !check.floating("x", x, &call.x_type) || !check.shape("used", used, {}) ||
      !check.dtype("used", used, ffi::DataType::S32)) {
    return call;
  }
  call.x = x.untyped_data();
  call.rows = x.dimensions()[0];
  call.tokens = *static_cast<const int32_t*>(used.untyped_data());
  check.require(call.tokens >= 0 && call.tokens <= call.rows, call.tokens, " tokens are to be multiplied of ", call.rows);
  call.in_features = x.dimensions()[1];
  if (norm_eps >= 0) {
    call.norm = reader.vector("norm", call.in_features);
    call.eps = norm_eps;
  }
  return call;
}

void read_matrix(Checker& check, PartReader& reader, std::string_view kind, Call& call) {
  const std::string_view stored = kind.substr(0, kind.find('+'));
  Matrix matrix{};
  matrix.weight = reader.weight(stored);
  if (stored.size() != kind.size()) matrix.bias = reader.vector("bias", matrix.weight.out_features);
  check.require(matrix.weight.in_features == call.in_features, "x has shape [", call.rows, ", ", call.in_features,
                "], wanted [any, ", matrix.weight.in_features, "]");
  call.matrices.push_back(matrix);
}

void cut(ffi::ThreadPool& pool, Call& call) {
  const int64_t token_block = call.products().token_block;
  call.token_blocks = (call.tokens + token_block - 1) / token_block;
  int64_t outputs = 0;
  const bool gated = call.activation != Activation::kNone;
  for (const Matrix& matrix : call.matrices) outputs += matrix.weight.out_features;
  if (gated) outputs /= 2;
  const int64_t tasks = kTasksPerThread * thread_count(pool), wanted = (tasks + call.token_blocks - 1) / call.token_blocks;
  const int64_t even = (outputs / wanted + kChunkOutputs - 1) / kChunkOutputs * kChunkOutputs;
  call.chunk = std::clamp<int64_t>(even, kChunkOutputs, 16 * kOutputBlock);
  call.chunks = 0;
  for (Matrix& matrix : call.matrices) {
    matrix.first_chunk = gated ? 0 : call.chunks;
    call.chunks = matrix.first_chunk + (matrix.weight.out_features + call.chunk - 1) / call.chunk;
  }
}

void run(ffi::ThreadPool& pool, const Call& call,
         const std::function<void(const float* packed, int64_t block, int64_t chunk)>& task) {
  const ProductKernels& products = call.products();
  const WeightView& weight = call.matrices[0].weight;
  const int64_t most = (call.tokens + call.token_blocks - 1) / call.token_blocks;
  const int64_t size = (products.packed_size(weight, most) + 15) / 16 * 16;
  float* packed = thread_scratch(Slot::kInput, call.token_blocks * size);
  const int64_t parts = call.tokens <= kSerialTokens ? 1 : thread_count(pool);
  Groundwork prepared(call.token_blocks * parts, [&](int64_t index) {
    const int64_t block = index / parts;
    prepare(call, call.first_token(block), call.first_token(block + 1), {index % parts, parts}, packed + block * size);
  });
  parallel_for(pool, call.token_blocks * call.chunks, [&](int64_t index) {
    prepared.finish();
    const int64_t block = index / call.chunks;
    task(packed + block * size, block, index % call.chunks);
  });
}

void add_bias(const float* bias, int64_t tokens, int64_t outputs, float* results) {
  if (bias == nullptr) return;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < outputs; ++i) results[t * kOutputBlock + i] += bias[i];
}

}  // namespace jaxkv
