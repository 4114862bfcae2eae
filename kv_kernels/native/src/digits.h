// Numbers as exact integers: a block of 32 as digits of eight bits, which integer instructions multiply with quants.
//
// A block is rounded to integers times a step: with three digits its largest number is kept to 2^-23 of itself, with two to
// 2^-15, with one to 1/254. Sums of a block's digits times quants are exact, in any order. A block with a number that is not
// finite gives nan, and one whose numbers are all below 2^-100 counts as zeros.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "bf16_rows.h"

namespace jaxkv {
namespace {

constexpr int kFloatDigits = 3;     // keep what float32 keeps
constexpr int kBfloat16Digits = 2;  // keep numbers of bfloat16 as they are, down to a 127th of their block's largest
constexpr int kByteDigits = 1;

// The lowest eight bits of n as a signed number, which are taken from n.
inline __m512i take_digit(__m512i* n) {
  const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(*n, 24), 24);
  *n = _mm512_srai_epi32(_mm512_sub_epi32(*n, digit), 8);
  return digit;
}

// What makes integers of the numbers of up to sixteen blocks that follow each other in a row, with a highest digit below
// 128, or 0; and what a lowest digit of one counts. Of more than one digit both are powers of two, so that numbers of few
// bits stay what they are.
template <int kDigits>
struct BlockSteps {
  alignas(64) float scales[16];
  alignas(64) float places[16];
  __mmask16 finite;

  BlockSteps(const float* row, int64_t blocks) {
    __m512i v[16];
    for (int64_t i = 0; i < 16; ++i) {
      const float* from = row + i * 32;
      v[i] = i < blocks ? _mm512_max_epu32(sizes(from), sizes(from + 16)) : _mm512_setzero_si512();
    }
    // As integers sizes have the same order, and nan is the largest.
    const __m512i largest = reduce_each(v, [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); });
    finite = _mm512_cmplt_epu32_mask(largest, _mm512_set1_epi32(0x7f800000));
    const __m512 size = _mm512_castsi512_ps(largest);
    __m512 scale;
    __mmask16 is_some;
    if constexpr (kDigits == kByteDigits) {
      is_some = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-100f), _CMP_NLT_UQ);
      scale = _mm512_maskz_div_ps(is_some, _mm512_set1_ps(127), size);
    } else {
      const __m512i above = _mm512_castps_si512(_mm512_mul_ps(size, _mm512_set1_ps(128.0f / 127.0f)));
      const __m512i exponent = _mm512_srli_epi32(above, 23);  // raised by 127
      is_some = _mm512_cmp_epi32_mask(exponent, _mm512_set1_epi32(127 - 100), _MM_CMPINT_NLT);
      const __m512i raised = _mm512_sub_epi32(_mm512_set1_epi32(8 * kDigits - 2 + 2 * 127), exponent);
      scale = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(is_some, raised, 23));
    }
    const __m512 place = _mm512_maskz_div_ps(is_some, _mm512_set1_ps(1), scale);
    _mm512_store_ps(scales, scale);
    _mm512_store_ps(places, _mm512_mask_mov_ps(_mm512_set1_ps(__builtin_nanf("")), finite, place));
  }

 private:
  static __m512i sizes(const float* from) {
    return _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(0x7fffffff));
  }
};

}  // namespace
}  // namespace jaxkv
