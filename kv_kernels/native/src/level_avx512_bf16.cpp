// CPUs with AVX-512 VNNI, BF16 and VBMI but no matrix tiles. Weights that have integers are multiplied by integers: of three
// digits where x is float32, of two where it is bfloat16, of one on request. Other products of bfloat16, and its attention,
// are in pairs. All else is the AVX-512 level's.
#include "bf16_finish.h"
#include "digits_product.h"
#include "lone_attention.h"
#include "pair_product.h"

namespace jaxkv {
namespace {

// Integers where the weight has them, else `kOthers`.
template <int kDigits, const ProductKernels& (*kOthers)()>
struct Products {
  static int64_t packed_size(const WeightView& weight, int64_t tokens) {
    if (!has_integers(weight.kind)) return kOthers().packed_size(weight, tokens);
    return digits_packed_size<kDigits>(weight, tokens);
  }
  static void pack(const WeightView& weight, const TokenRows& x, int64_t tokens, Part part, float* packed) {
    if (!has_integers(weight.kind)) return kOthers().pack(weight, x, tokens, part, packed);
    digits_pack<kDigits>(weight, x, tokens, part, packed);
  }
  static void product(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output,
                      int64_t outputs, float* results) {
    if (!has_integers(weight.kind)) return kOthers().product(weight, packed, tokens, first_output, outputs, results);
    digits_product<kDigits>(weight, packed, tokens, first_output, outputs, results);
  }
  static void finished_product(const WeightView& weight, const WeightView* gate, const float* packed, int64_t tokens,
                               int64_t first_output, int64_t outputs, const Finish& finish) {
    product_of_rows(product, weight, gate, packed, tokens, first_output, outputs, finish);
  }
  // As many tokens as leave their digits in the second-level cache.
  static constexpr ProductKernels kTable{
      kDigits == kByteDigits ? kTokenBlock : kTokenBlock / 2, packed_size, pack, product, nullptr, finished_product};
};

const ProductKernels& float_products() { return avx512_kernels().products; }
const ProductKernels& pair_products() {
  static constexpr ProductKernels table{kTokenBlock / 2, pair_packed_size, pair_pack, pair_product};
  return table;
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
  static const Kernels table = [] {
    Kernels kernels = avx512_kernels();
    kernels.name = "avx512_bf16";
    kernels.products = Products<kFloatDigits, float_products>::kTable;
    kernels.bf16_products = Products<kBfloat16Digits, pair_products>::kTable;
    kernels.int8_products = Products<kByteDigits, float_products>::kTable;
    kernels.attend = pair_attend;
    kernels.attend_split = pair_attend_split;
    kernels.attend_scratch = pair_attend_scratch;
    return kernels;
  }();
  return table;
}

}  // namespace jaxkv
