// What becomes of a product's results in bfloat16, row by row and in one pass: bias, gate, residual, rounding.
#pragma once

#include "bf16_functions.h"
#include "bf16_rows.h"

namespace jaxkv {
namespace {

// Outputs [output, output + outputs) of all tokens: sums, and gates where there are any, are [tokens][kOutputBlock].
inline void finish_rows(const Finish& finish, const float* sums, const float* gates, int64_t tokens, int64_t output,
                        int64_t outputs) {
  const auto biased = [&](const float* numbers, const float* bias, int64_t i, __mmask16 present) {
    const __m512 v = _mm512_loadu_ps(numbers + i);
    return bias == nullptr ? v : _mm512_add_ps(v, _mm512_maskz_loadu_ps(present, bias + output + i));
  };
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t at = token * finish.stride + output;
    for (int64_t i = 0; i < outputs; i += 16) {
      const auto present = static_cast<__mmask16>(outputs - i < 16 ? (1 << (outputs - i)) - 1 : 0xffff);
      __m512 v = biased(sums + token * kOutputBlock, finish.bias, i, present);
      if (gates != nullptr) {
        const __m512 gate = biased(gates + token * kOutputBlock, finish.gate_bias, i, present);
        v = quick_gated(finish.activation, gate, v);
      }
      if (finish.residual != nullptr) {
        const __m256i from = _mm256_maskz_loadu_epi16(present, static_cast<const uint16_t*>(finish.residual) + at + i);
        v = _mm512_add_ps(v, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(from), 16)));
      }
      const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(finish.out) + at + i, present, rounded);
    }
  }
}

// A product of any number of outputs with `multiply`, finished as it goes.
inline void product_of_rows(decltype(ProductKernels::product) multiply, const WeightView& weight,
                            const WeightView* gate, const float* packed, int64_t tokens, int64_t first_output,
                            int64_t outputs, const Finish& finish) {
  alignas(64) float sums[kTokenBlock * kOutputBlock];
  alignas(64) float gates[kTokenBlock * kOutputBlock];
  for (int64_t output = first_output; output < first_output + outputs; output += kOutputBlock) {
    const int64_t left = first_output + outputs - output, count = left < kOutputBlock ? left : kOutputBlock;
    multiply(weight, packed, tokens, output, count, sums);
    if (gate != nullptr) multiply(*gate, packed, tokens, output, count, gates);
    finish_rows(finish, sums, gate == nullptr ? nullptr : gates, tokens, output, count);
  }
}

}  // namespace
}  // namespace jaxkv
