// What becomes of a product's sums in bfloat16: bias, gate and residual while they are in the first-level cache, and then
// they are rounded and turned to rows of tokens.
#pragma once

#include "bf16_functions.h"
#include "amx_tile.h"
#include "bf16_rows.h"
#include "quant_rows.h"

namespace jaxkv {
namespace {

// Pairs of outputs [8 pairs][16 tokens] as rows: rows[j] has those of tokens j and 4 + j, rows[4 + j] of 8 + j and 12 + j.
inline void pairs_to_rows(const __m512i* pairs, __m512i* rows) {
  const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  __m512i quads[2][4];  // of a token in every quarter, four pairs
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m512i* four = pairs + 4 * half;
    const __m512i a = _mm512_unpacklo_epi32(four[0], four[1]), b = _mm512_unpackhi_epi32(four[0], four[1]);
    const __m512i c = _mm512_unpacklo_epi32(four[2], four[3]), d = _mm512_unpackhi_epi32(four[2], four[3]);
    quads[half][0] = _mm512_unpacklo_epi64(a, c);
    quads[half][1] = _mm512_unpackhi_epi64(a, c);
    quads[half][2] = _mm512_unpacklo_epi64(b, d);
    quads[half][3] = _mm512_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm512_permutex2var_epi64(quads[0][j], lower, quads[1][j]);
    rows[4 + j] = _mm512_permutex2var_epi64(quads[0][j], upper, quads[1][j]);
  }
}

// The reverse.
inline void rows_to_pairs(const __m512i* rows, __m512i* pairs) {
  const __m512i lower = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), upper = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
  __m512i quads[2][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    quads[0][j] = _mm512_permutex2var_epi64(rows[j], lower, rows[4 + j]);
    quads[1][j] = _mm512_permutex2var_epi64(rows[j], upper, rows[4 + j]);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m512i* four = quads[half];
    const __m512i a = _mm512_unpacklo_epi32(four[0], four[1]), b = _mm512_unpackhi_epi32(four[0], four[1]);
    const __m512i c = _mm512_unpacklo_epi32(four[2], four[3]), d = _mm512_unpackhi_epi32(four[2], four[3]);
    pairs[4 * half] = _mm512_unpacklo_epi64(a, c);
    pairs[4 * half + 1] = _mm512_unpackhi_epi64(a, c);
    pairs[4 * half + 2] = _mm512_unpacklo_epi64(b, d);
    pairs[4 * half + 3] = _mm512_unpackhi_epi64(b, d);
  }
}

// Sixteen outputs, from `output` on, of up to sixteen tokens, from `token` on.
class FinishedTile {
 public:
  FinishedTile(const Finish& finish, int64_t token, int64_t tokens, int64_t output, int64_t outputs)
      : finish_(finish), at_(token * finish.stride + output), tokens_(tokens), output_(output),
        outputs_(outputs < kTileOutputs ? outputs : kTileOutputs) {}

  // sums, and gates where there are any: [16 outputs][16 tokens].
  void store(const float* sums, const float* gates) const {
    __m512 v[kTileOutputs];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kTileOutputs; ++i) v[i] = biased(sums, i, finish_.bias);
    if (gates != nullptr) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kTileOutputs; ++i)
        v[i] = quick_gated(finish_.activation, biased(gates, i, finish_.gate_bias), v[i]);
    }
    if (finish_.residual != nullptr) add_residual(v);
    __m512i pairs[kTileOutputs / 2], rows[8];
#pragma GCC unroll 8
    for (int i = 0; i < kTileOutputs / 2; ++i) pairs[i] = narrowed_pairs(v[2 * i], v[2 * i + 1]);
    pairs_to_rows(pairs, rows);
    auto* to = static_cast<uint16_t*>(finish_.out) + at_;
    each_row([&](int64_t token, int vector, bool is_upper) {
      const __m256i row = is_upper ? _mm512_extracti64x4_epi64(rows[vector], 1) : _mm512_castsi512_si256(rows[vector]);
      _mm256_mask_storeu_epi16(to + token * finish_.stride, present(), row);
    });
  }

 private:
  __m512 biased(const float* sums, int64_t i, const float* bias) const {
    const __m512 v = _mm512_load_ps(sums + i * kTileRows);
    return bias == nullptr || i >= outputs_ ? v : _mm512_add_ps(v, _mm512_set1_ps(bias[output_ + i]));
  }
  void add_residual(__m512* v) const {
    const auto* from = static_cast<const uint16_t*>(finish_.residual) + at_;
    __m512i rows[8] = {}, pairs[kTileOutputs / 2];
    each_row([&](int64_t token, int vector, bool is_upper) {
      const __m256i row = _mm256_maskz_loadu_epi16(present(), from + token * finish_.stride);
      rows[vector] = is_upper ? _mm512_inserti64x4(rows[vector], row, 1) : _mm512_zextsi256_si512(row);
    });
    rows_to_pairs(rows, pairs);
#pragma GCC unroll 8
    for (int i = 0; i < kTileOutputs / 2; ++i) {
      const __m512i high = _mm512_and_si512(pairs[i], _mm512_set1_epi32(static_cast<int>(0xffff0000)));
      v[2 * i] = _mm512_add_ps(v[2 * i], _mm512_castsi512_ps(_mm512_slli_epi32(pairs[i], 16)));
      v[2 * i + 1] = _mm512_add_ps(v[2 * i + 1], _mm512_castsi512_ps(high));
    }
  }
  // Every token with where `pairs_to_rows` has its row; those of a lower half come before the upper one.
  template <class F>
  void each_row(F use) const {
#pragma GCC unroll 16
    for (int64_t token = 0; token < 16; ++token)
      if (token < tokens_) use(token, static_cast<int>(token / 8 * 4 + token % 4), token / 4 % 2 == 1);
  }
  __mmask16 present() const { return static_cast<__mmask16>((1 << outputs_) - 1); }

  const Finish& finish_;
  int64_t at_, tokens_, output_, outputs_;
};

}  // namespace
}  // namespace jaxkv
