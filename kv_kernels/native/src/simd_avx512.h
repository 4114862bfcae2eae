// Vectors of sixteen floats: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jaxkv {
namespace {

struct Avx512Simd {
  using V = __m512;
  static constexpr const char* kName = "avx512";
  static constexpr int kWidth = 16;
  static constexpr int kTileRows = 6;
  static constexpr int kDirectTokens = 4;  // up to so many tokens weights are unpacked in registers
  static constexpr int kValueRows = 6;

  static V zero() { return _mm512_setzero_ps(); }
  static V broadcast(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static __m256i load_words(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static V load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_words(p)); }
  static V load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p)), 16));
  }
  static void store_f16(uint16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V zero_where_below(V x, V limit, V value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
  }
  static V with_sign_of(V size, V x) { return _mm512_or_ps(size, _mm512_and_ps(x, broadcast(-0.0f))); }
  static V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V times_power_of_two(V a, V n) { return _mm512_scalef_ps(a, n); }
  static float sum(V v) { return _mm512_reduce_add_ps(v); }
  static float highest(V v) { return _mm512_reduce_max_ps(v); }
  static __m128 sums(V a, V b, V c, V d) {
    // Halves of a pair folded into one vector, twice, so that the last folds serve all four.
    const V ab = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const V cd = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    const V quarters = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    const V pairs = add(quarters, _mm512_permute_ps(quarters, 0x4e));
    const V whole = add(pairs, _mm512_permute_ps(pairs, 0xb1));
    return _mm512_castps512_ps128(
        _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), whole));
  }
  static void store_sums(float* out, V a, V b, V c, V d) { _mm_storeu_ps(out, sums(a, b, c, d)); }
  static void add_sums(float* out, V a, V b, V c, V d) {
    _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), sums(a, b, c, d)));
  }
  static void transpose(const float* from, int64_t stride, float* to, int64_t to_stride) {
    V rows[16], pairs[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = load(from + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // quarter l of rows[i + c]: column 4l + c of rows i to i + 3
      rows[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      rows[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      rows[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      rows[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const V a = _mm512_shuffle_f32x4(rows[c], rows[c + 4], 0x44), b = _mm512_shuffle_f32x4(rows[c], rows[c + 4], 0xee);
      const V d = _mm512_shuffle_f32x4(rows[c + 8], rows[c + 12], 0x44);
      const V e = _mm512_shuffle_f32x4(rows[c + 8], rows[c + 12], 0xee);
      store(to + c * to_stride, _mm512_shuffle_f32x4(a, d, 0x88));
      store(to + (c + 4) * to_stride, _mm512_shuffle_f32x4(a, d, 0xdd));
      store(to + (c + 8) * to_stride, _mm512_shuffle_f32x4(b, e, 0x88));
      store(to + (c + 12) * to_stride, _mm512_shuffle_f32x4(b, e, 0xdd));
    }
  }
  static void unpack_nibbles(const uint8_t* p, float d, float m, V* out) {
    // A block has sixteen values: computed once, then looked up. A lookup reads the low four bits of an index only.
    const V steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const V table = fma(steps, broadcast(d), broadcast(m));
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    out[0] = _mm512_permutexvar_ps(bytes, table);
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
  }
  template <int kHighBits, int kPerBlock>
  static void unpack_bits(const uint8_t* p, const uint8_t* high_bits, const float* d, const float* m, V* out) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    __m512i quants[2] = {_mm512_and_si512(bytes, _mm512_set1_epi32(15)), _mm512_srli_epi32(bytes, 4)};
    for (int half = 0; half < 2; ++half) {
      for (int bit = 0; bit < kHighBits; ++bit) {
        uint16_t set;
        __builtin_memcpy(&set, high_bits + 4 * bit + 2 * half, 2);
        quants[half] = _mm512_mask_or_epi32(quants[half], set, quants[half], _mm512_set1_epi32(16 << bit));
      }
      const int at = kPerBlock == 2 ? half : 0;
      out[half] = fma(_mm512_cvtepi32_ps(quants[half]), broadcast(d[at]), broadcast(m[at]));
    }
  }
  static void unpack_float8(const uint8_t* p, float d, V* out) {
    // As float16 the bits are 2^-8 of the value, with subnormals in their place.
    const V scale = broadcast(256 * d);
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
    const __m512i rest = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x7f)), 7);
    const __m512i halves = _mm512_or_si512(sign, rest);
    out[0] = mul(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), scale);
    out[1] = mul(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), scale);
  }
  static void unpack_bytes(const int8_t* p, float d, V* out) {
    const V scale = broadcast(d);
    for (int i = 0; i < 2; ++i) {
      const __m512i bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
      out[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(bytes), scale);
    }
  }
};

}  // namespace
}  // namespace jaxkv
