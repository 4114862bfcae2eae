// Numbers as exact integers: a block of 32 as digits of eight bits, which integer instructions multiply with quants.
//
// A block is rounded to integers times a step: with three digits its largest number is kept to 2^-23 of itself, with two to
// 2^-15, with one to 1/254. Sums of a block's digits times quants are exact, in any order. A block with a number that is not
// finite gives nan, and one whose numbers are all below 2^-100 counts as zeros.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace jaxkv {
namespace {

constexpr int kFloatDigits = 3;     // keep what float32 keeps
constexpr int kBfloat16Digits = 2;  // keep numbers of bfloat16 as they are, down to a 127th of their block's largest
constexpr int kByteDigits = 1;

// What makes integers of kDigits digits of numbers up to `largest`, with a highest digit below 128; or 0. Of more than one
// digit it is a power of two, so that numbers of few bits stay what they are.
template <int kDigits>
inline float integer_scale(float largest) {
  if constexpr (kDigits == kByteDigits) return largest < 0x1p-100f ? 0.0f : 127.0f / largest;
  const float above = largest * (128.0f / 127.0f);
  uint32_t bits;
  std::memcpy(&bits, &above, sizeof bits);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  if (exponent < -100) return 0;
  bits = static_cast<uint32_t>(8 * kDigits - 2 - exponent + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// The lowest eight bits of n as a signed number, which are taken from n.
inline __m512i take_digit(__m512i* n) {
  const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(*n, 24), 24);
  *n = _mm512_srai_epi32(_mm512_sub_epi32(*n, digit), 8);
  return digit;
}

// One block of one token.
template <int kDigits>
struct BlockDigits {
  __m512i digits[kDigits][2];  // lowest first, of the first and the second half
  float place;                 // what a lowest digit of one counts
  float sum;                   // of the numbers: as they were, or of fewer than three digits as they were rounded

  explicit BlockDigits(const float* from) {
    const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
    constexpr int kNotFinite = 0x99;
    const bool finite = !(_mm512_fpclass_ps_mask(low, kNotFinite) | _mm512_fpclass_ps_mask(high, kNotFinite));
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const float scale = integer_scale<kDigits>(largest);
    place = !finite ? __builtin_nanf("") : scale == 0 ? 0.0f : 1.0f / scale;
    const __mmask16 kept = finite ? 0xffff : 0;  // or sums of digits could overflow
    __m512i n = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(low, _mm512_set1_ps(scale)));
    __m512i m = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(high, _mm512_set1_ps(scale)));
    if constexpr (kDigits == kFloatDigits) {
      sum = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
    } else {
      total = _mm512_reduce_add_epi32(_mm512_add_epi32(n, m));
      sum = static_cast<float>(total) * place;
    }
#pragma GCC unroll 3
    for (int digit = 0; digit < kDigits - 1; ++digit) {
      digits[digit][0] = take_digit(&n);
      digits[digit][1] = take_digit(&m);
    }
    digits[kDigits - 1][0] = n;
    digits[kDigits - 1][1] = m;
  }
  // Of the two lowest digits, or of the only one; and of the third.
  int32_t lower_sum() const {
    if constexpr (kDigits == kFloatDigits) return digit_sum(1) * 256 + digit_sum(0);
    return total;
  }
  int32_t digit_sum(int digit) const {
    return _mm512_reduce_add_epi32(_mm512_add_epi32(digits[digit][0], digits[digit][1]));
  }

 private:
  int32_t total;  // of fewer than three digits
};

}  // namespace
}  // namespace jaxkv
