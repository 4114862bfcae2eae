// Vectors of pairs of bfloat16 where others have floats: multiplying two adds both products to a sum in float32.
#pragma once

#include "bf16_rows.h"
#include "simd_avx512.h"

namespace jaxkv {
namespace {

constexpr int64_t kPairStep = 32;  // numbers of a vector

struct PairSimd : Avx512Simd {
  static V fma(V a, V b, V sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

}  // namespace
}  // namespace jaxkv
