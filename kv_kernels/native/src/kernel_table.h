// The kernels of one instruction set, gathered.
#pragma once

#include <type_traits>

#include "attention_kernel.h"
#include "elementwise.h"
#include "product.h"

namespace jaxkv {
namespace {

template <class S>
constexpr Kernels kernel_table() {
  constexpr ProductKernels kProducts{96, packed_size<S>, pack<S>, product<S>};
  return Kernels{S::kName,        kProducts,       kProducts,         ProductKernels{}, argmax<S>,     normalize<S>, rotate<S>, gate<S>,
                 attend<WideBlock<S>>, attend_split<WideBlock<S>>, merge_splits<S>,   partial_size<S>, attend_scratch<WideBlock<S>>,
                 unpack_row<S>,   widen<S>,        narrow_all<S>};
}

}  // namespace
}  // namespace jaxkv
