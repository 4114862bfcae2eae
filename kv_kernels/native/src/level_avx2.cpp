#include "kernel_table.h"
#include "simd_avx2.h"

namespace jaxkv {

const Kernels& avx2_kernels() {
  static constexpr Kernels table = kernel_table<Avx2Simd>();
  return table;
}

}  // namespace jaxkv
