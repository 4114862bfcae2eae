// The kernels of one instruction set, gathered.
#pragma once

#include <type_traits>

#include "attention_kernel.h"
#include "elementwise.h"
#include "product.h"

namespace jaxkv {

template <class S>
constexpr Kernels kernel_table() {
  return Kernels{S::kName,       packed_size<S>,  pack<S>,         product<S>,        argmax<S>,  normalize<S>,
                 rotate<S>,      gate<S>,         attend<S>,       attend_split<S>,   merge_splits<S>,
                 partial_size<S>, attend_scratch<S>, unpack_row<S>, widen<S>,          narrow_all<S>};
}

}  // namespace jaxkv
