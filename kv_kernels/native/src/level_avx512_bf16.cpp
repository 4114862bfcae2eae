// CPUs that multiply bytes (VNNI) and pairs of bf16 in vectors, but have no matrix tiles: quantized weights in exact
// integers, of two digits where x is bfloat16 and of one on request, and attention in bfloat16. All else is the AVX-512 level's.
#include "digits_product.h"
#include "pair_attention.h"

namespace jaxkv {
namespace {

template <int kDigits>
int64_t packed_size(const WeightView& weight, int64_t tokens) {
  if (!is_quantized(weight.kind)) return avx512_kernels().products.packed_size(weight, tokens);
  return digits_packed_size<kDigits>(weight, tokens);
}

template <int kDigits>
void pack(const WeightView& weight, const TokenRows& x, int64_t tokens, float* packed) {
  if (!is_quantized(weight.kind)) return avx512_kernels().products.pack(weight, x, tokens, packed);
  digits_pack<kDigits>(weight, x, tokens, packed);
}

template <int kDigits>
void product(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
             float* results) {
  if (!is_quantized(weight.kind))
    return avx512_kernels().products.product(weight, packed, tokens, first_output, outputs, results);
  digits_product<kDigits>(weight, packed, tokens, first_output, outputs, results);
}

template <int kDigits>
constexpr ProductKernels products() {
  return {kTokenBlock / kDigits, packed_size<kDigits>, pack<kDigits>, product<kDigits>};
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
  static const Kernels table = [] {
    Kernels kernels = avx512_kernels();
    kernels.name = "avx512_bf16";
    kernels.products = products<kFloatDigits>();
    kernels.bf16_products = products<kBfloat16Digits>();
    kernels.int8_products = products<kByteDigits>();
    kernels.attend = pair_attend;
    kernels.attend_split = pair_attend_split;
    kernels.attend_scratch = pair_attend_scratch;
    return kernels;
  }();
  return table;
}

}  // namespace jaxkv
