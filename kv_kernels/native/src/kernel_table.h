// The kernels of one instruction set, gathered.
#pragma once

#include <type_traits>

#include "attention_kernel.h"
#include "product.h"

namespace jaxkv {

template <class S>
constexpr Kernels kernel_table() {
  return Kernels{S::kName, product<S>, attend<S>, attend_scratch<S>, unpack_row<S>, widen<S>, narrow_all<S>};
}

}  // namespace jaxkv
