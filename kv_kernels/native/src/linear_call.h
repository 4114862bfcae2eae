// What calls have in common that multiply activations with matrices: x, normalized and packed, and the work cut in tasks
// of some outputs for a block of tokens. A block is normalized and packed once for all of its tasks.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "operands.h"
#include "parallel.h"

namespace jaxkv {

struct Matrix {
  WeightView weight;
  const float* bias;  // [out], or null
  void* out;          // [rows, out]
  Element out_type;
  int64_t first_chunk;  // its first task among those of a token block
};

struct Call {
  const void* x;
  Element x_type;
  int64_t rows;    // of x and of the results
  int64_t tokens;  // the first of them, which are multiplied
  int64_t in_features;
  const float* norm;  // [in], or null
  float eps;
  const void* residual;  // [rows, out] of the first result's type, or null
  Activation activation;
  std::vector<Matrix> matrices;
  int64_t token_blocks;
  int64_t chunk;   // outputs of a task
  int64_t chunks;  // tasks of a token block

  bool int8_x;  // x may be rounded

  const ProductKernels& products() const {
    const Kernels& level = kernels();
    if (int8_x && level.int8_products.product != nullptr && has_integers(matrices[0].weight.kind))
      return level.int8_products;
    return x_type == Element::kBF16 ? level.bf16_products : level.products;
  }
  int64_t first_token(int64_t block) const { return tokens * block / token_blocks; }
};

// A call of x [rows, in], of which the first `used` i32 [] are multiplied, and, where norm_eps >= 0, the norm's weight f32
// [in], the next of the parts. x may be rounded to 8 bits a block where quantized weights meet it, if `int8_x`.
Call read_x(Checker& check, PartReader& reader, const ffi::AnyBuffer& x, const ffi::AnyBuffer& used, float norm_eps,
            bool int8_x);

// Adds a matrix [out, in] and its bias f32 [out], as a word like "q4_1" or "dense+bias" says.
void read_matrix(Checker& check, PartReader& reader, std::string_view kind, Call& call);

// Decides on the tasks of a call.
void cut(ffi::ThreadPool& pool, Call& call);

// Calls task(packed, block, chunk) for every task of a call that was cut, on any thread; `packed` holds the block's tokens.
void run(ffi::ThreadPool& pool, const Call& call,
         const std::function<void(const float* packed, int64_t block, int64_t chunk)>& task);

// results [tokens][kOutputBlock] + bias, which may be null.
void add_bias(const float* bias, int64_t tokens, int64_t outputs, float* results);

}  // namespace jaxkv
