// Quantized weights on AMX tiles of bf16; all else is the AVX-512 level's. Dense weights would have to be cut in parts
// number by number, which for few tokens takes longer than their products.
#include "amx_bf16.h"
#include "amx_product.h"
#include "amx_tall_attention.h"

namespace jaxkv {

const Kernels& amx_kernels() {
  static const Kernels table = [] {
    Kernels kernels = avx512_kernels();
    kernels.name = "amx";
    kernels.products = {96, amx_packed_size, amx_pack, amx_product};
    kernels.bf16_products = {kTokenBlock,    narrow_packed_size, narrow_pack,
                             narrow_product, narrow_pack_narrow, narrow_finished_product};
    kernels.attend = narrow_attend;
    kernels.attend_split = narrow_attend_split;
    kernels.attend_scratch = narrow_attend_scratch;
    return kernels;
  }();
  return table;
}

}  // namespace jaxkv
