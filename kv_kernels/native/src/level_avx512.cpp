#include "kernel_table.h"
#include "simd_avx512.h"

namespace jaxkv {

const Kernels& avx512_kernels() {
  static constexpr Kernels table = kernel_table<Avx512Simd>();
  return table;
}

}  // namespace jaxkv
