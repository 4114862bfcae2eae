// Numbers between the forms that tiles take: rounded to bf16, and turned.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jaxkv {
namespace {

inline __m512i narrowed(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Numbers of two vectors in pairs of bf16: number i of the first and number i of the second.
inline __m512i narrowed_pairs(__m512 first, __m512 second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), narrowed(first, second));
}

// Number j of vector i becomes number i of vector j.
inline void transpose(__m512i* v) {
  __m512i t[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c);
    t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d);
    t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88), b = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88), d = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
    v[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    v[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

// Number j is what `add` makes of all numbers of v[j], in the order of the reductions of one vector.
template <class F>
inline __m512i reduce_each(__m512i* v, F add) {
  transpose(v);
#pragma GCC unroll 4
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = add(v[i], v[i + half]);
  return v[0];
}

inline __m512 load_some(const float* from, int64_t count) {
  if (count >= 16) return _mm512_loadu_ps(from);
  return count <= 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << count) - 1), from);
}

inline __m256i load_some_words(const uint16_t* from, int64_t count) {
  return count <= 0 ? _mm256_setzero_si256()
                    : _mm256_maskz_loadu_epi16(static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1), from);
}

// 32 numbers of a row as bf16: 16 from its start and 16 from `apart` on, of the `count` it has.
inline __m512i narrow_some(const float* row, int64_t count, int64_t apart) {
  return narrowed(load_some(row, count), load_some(row + apart, count - apart));
}
inline __m512i narrow_some(const uint16_t* row, int64_t count, int64_t apart) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load_some_words(row, count)),
                            load_some_words(row + apart, count - apart), 1);
}

// Rows of floats, or of bf16, as columns of pairs of bf16, the form of the second operand: [rows][stride], at most 16 rows,
// to [16][height], zeros after the last. `narrow_some` says which numbers of a row.
template <class Number>
inline void pack_columns(const Number* from, int64_t stride, int64_t rows, int64_t count, int64_t apart, int64_t height,
                         float* to) {
  __m512i v[16];
  for (int64_t i = 0; i < 16; ++i) v[i] = i < rows ? narrow_some(from + i * stride, count, apart) : _mm512_setzero_si512();
  if (height == 1) return _mm512_storeu_si512(to, v[0]);
  transpose(v);
  const __mmask16 present = static_cast<__mmask16>((1 << height) - 1);
  for (int64_t i = 0; i < 16; ++i) _mm512_mask_storeu_epi32(to + i * height, present, v[i]);
}

}  // namespace
}  // namespace jaxkv
