// Quantized weights on AMX tiles of bf16; all else is the AVX-512 level's. Dense weights would have to be cut in parts
// number by number, which for few tokens takes longer than their products.
#include "amx_product.h"

namespace jaxkv {

const Kernels& amx_kernels() {
  static const Kernels table = [] {
    Kernels kernels = avx512_kernels();
    kernels.name = "amx";
    kernels.packed_size = amx_packed_size;
    kernels.pack = amx_pack;
    kernels.product = amx_product;
    return kernels;
  }();
  return table;
}

}  // namespace jaxkv
