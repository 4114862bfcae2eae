// Vectors of eight floats: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jaxkv {
namespace {

struct Avx2Simd {
  using V = __m256;
  static constexpr const char* kName = "avx2";
  static constexpr int kWidth = 8;
  static constexpr int kTileRows = 3;
  static constexpr int kDirectTokens = 3;  // up to so many tokens weights are unpacked in registers
  static constexpr int kValueRows = 2;

  static V zero() { return _mm256_setzero_ps(); }
  static V broadcast(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static __m128i load_words(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static V load_f16(const uint16_t* p) { return _mm256_cvtph_ps(load_words(p)); }
  static V load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(p)), 16));
  }
  static void store_f16(uint16_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V zero_where_below(V x, V limit, V value) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), value);
  }
  static V with_sign_of(V size, V x) { return _mm256_or_ps(size, _mm256_and_ps(x, broadcast(-0.0f))); }
  static V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V times_power_of_two(V a, V n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
  }
  static __m128 halves(V v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }
  static float sum(V v) {
    __m128 x = halves(v);
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float highest(V v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static __m128 sums(V a, V b, V c, V d) {
    return _mm_hadd_ps(_mm_hadd_ps(halves(a), halves(b)), _mm_hadd_ps(halves(c), halves(d)));
  }
  static void store_sums(float* out, V a, V b, V c, V d) { _mm_storeu_ps(out, sums(a, b, c, d)); }
  static void add_sums(float* out, V a, V b, V c, V d) {
    _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), sums(a, b, c, d)));
  }
  static void transpose(const float* from, int64_t stride, float* to, int64_t to_stride) {
    V rows[8], pairs[8];
    for (int i = 0; i < 8; ++i) rows[i] = load(from + i * stride);
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {  // rows[i + c]: columns c and c + 4 of rows i to i + 3
      rows[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      rows[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      rows[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      rows[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int c = 0; c < 4; ++c) {
      store(to + c * to_stride, _mm256_permute2f128_ps(rows[c], rows[c + 4], 0x20));
      store(to + (c + 4) * to_stride, _mm256_permute2f128_ps(rows[c], rows[c + 4], 0x31));
    }
  }
  static void unpack_nibbles(const uint8_t* p, float d, float m, V* out) {
    const V scale = broadcast(d), offset = broadcast(m);
    const __m256i low = _mm256_set1_epi32(15);
    for (int i = 0; i < 2; ++i) {
      const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
      out[i] = fma(_mm256_cvtepi32_ps(_mm256_and_si256(bytes, low)), scale, offset);
      out[i + 2] = fma(_mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4)), scale, offset);
    }
  }
  template <int kHighBits, int kPerBlock>
  static void unpack_bits(const uint8_t* p, const uint8_t* high_bits, const float* d, const float* m, V* out) {
    const __m256i low = _mm256_set1_epi32(15), one_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < 4; ++i) {
      const auto* from = reinterpret_cast<const __m128i*>(p + 8 * (i % 2));
      const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from));
      __m256i quants = i < 2 ? _mm256_and_si256(bytes, low) : _mm256_srli_epi32(bytes, 4);
      for (int bit = 0; bit < kHighBits; ++bit) {
        const __m256i set = _mm256_and_si256(_mm256_set1_epi32(high_bits[4 * bit + i]), one_bit);
        const __m256i mask = _mm256_cmpeq_epi32(set, one_bit);
        quants = _mm256_or_si256(quants, _mm256_and_si256(mask, _mm256_set1_epi32(16 << bit)));
      }
      const int at = kPerBlock == 2 ? i / 2 : 0;
      out[i] = fma(_mm256_cvtepi32_ps(quants), broadcast(d[at]), broadcast(m[at]));
    }
  }
  static void unpack_float8(const uint8_t* p, float d, V* out) {
    // As float16 the bits are 2^-8 of the value, with subnormals in their place.
    const V scale = broadcast(256 * d);
    for (int i = 0; i < 4; ++i) {
      const __m128i bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
      const __m128i sign = _mm_slli_epi16(_mm_and_si128(bytes, _mm_set1_epi16(0x80)), 8);
      const __m128i rest = _mm_slli_epi16(_mm_and_si128(bytes, _mm_set1_epi16(0x7f)), 7);
      out[i] = mul(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), scale);
    }
  }
  static void unpack_bytes(const int8_t* p, float d, V* out) {
    const V scale = broadcast(d);
    for (int i = 0; i < 4; ++i) {
      const __m256i bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
      out[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(bytes), scale);
    }
  }
};

}  // namespace
}  // namespace jaxkv
