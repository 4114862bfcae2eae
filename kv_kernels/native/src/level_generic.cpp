#include "kernel_table.h"
#include "simd_generic.h"

namespace jaxkv {

const Kernels& generic_kernels() {
  static constexpr Kernels table = kernel_table<GenericSimd>();
  return table;
}

}  // namespace jaxkv
