// Vectors of four floats through the compiler's own vector types: what any CPU has.
#pragma once

#include <cstdint>

#include "half.h"

namespace jaxkv {
namespace {

struct GenericSimd {
  using V = float __attribute__((vector_size(16)));
  using I = int32_t __attribute__((vector_size(16)));
  static constexpr const char* kName = "generic";
  static constexpr int kWidth = 4;
  static constexpr int kTileRows = 2;      // tokens of a product's register tile
  static constexpr int kDirectTokens = 2;  // up to so many tokens weights are unpacked in registers
  static constexpr int kValueRows = 2;     // rows of the tile of weights times values

  static V zero() { return V{0, 0, 0, 0}; }
  static V broadcast(float x) { return V{x, x, x, x}; }
  static V load(const float* p) {
    V v;
    __builtin_memcpy(&v, p, 16);
    return v;
  }
  static void store(float* p, V v) { __builtin_memcpy(p, &v, 16); }
  static V load_f16(const uint16_t* p) {
    return V{f16_to_float(p[0]), f16_to_float(p[1]), f16_to_float(p[2]), f16_to_float(p[3])};
  }
  static V load_bf16(const uint16_t* p) {
    return V{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
  }
  static void store_f16(uint16_t* p, V v) {
    for (int i = 0; i < 4; ++i) p[i] = float_to_f16(v[i]);
  }
  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return a * b + c; }
  static V max(V a, V b) { return a > b ? a : b; }
  static V zero_where_below(V x, V limit, V value) { return x < limit ? zero() : value; }
  static V with_sign_of(V size, V x) { return x < zero() ? -size : size; }
  static V round(V a) {  // to nearest even, for |a| below 2^22
    const V magic = broadcast(12582912.0f);
    return (a + magic) - magic;
  }
  static V times_power_of_two(V a, V n) {
    const I exponent = (__builtin_convertvector(n, I) + 127) << 23;
    V power;
    __builtin_memcpy(&power, &exponent, 16);
    return a * power;
  }
  static float sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  static float highest(V v) {
    const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
  }
  // `to` [kWidth][to_stride] is the transpose of `from` [kWidth][stride].
  static void transpose(const float* from, int64_t stride, float* to, int64_t to_stride) {
    for (int i = 0; i < kWidth; ++i)
      for (int j = 0; j < kWidth; ++j) to[j * to_stride + i] = from[i * stride + j];
  }
  static V sums(V a, V b, V c, V d) { return V{sum(a), sum(b), sum(c), sum(d)}; }
  static void store_sums(float* out, V a, V b, V c, V d) { store(out, sums(a, b, c, d)); }
  static void add_sums(float* out, V a, V b, V c, V d) { store(out, load(out) + sums(a, b, c, d)); }
  // 32 nibbles of 16 bytes (low ones first) times d plus m.
  static void unpack_nibbles(const uint8_t* p, float d, float m, V* out) {
    for (int i = 0; i < 4; ++i) {
      const uint8_t* b = p + 4 * i;
      const I bytes{b[0], b[1], b[2], b[3]};
      out[i] = __builtin_convertvector(bytes & 15, V) * broadcast(d) + broadcast(m);
      out[i + 4] = __builtin_convertvector(bytes >> 4, V) * broadcast(d) + broadcast(m);
    }
  }
  // The same with kHighBits words of bits that lie above the nibbles, d and m for the block or for each half of it.
  template <int kHighBits, int kPerBlock>
  static void unpack_bits(const uint8_t* p, const uint8_t* high_bits, const float* d, const float* m, V* out) {
    for (int i = 0; i < 8; ++i) {
      const uint8_t* b = p + 4 * (i % 4);
      I quants{b[0], b[1], b[2], b[3]};
      quants = i < 4 ? quants & 15 : quants >> 4;
      for (int bit = 0; bit < kHighBits; ++bit) {
        const int set = high_bits[4 * bit + i / 2] >> (i % 2 * 4);
        quants |= I{set & 1, set >> 1 & 1, set >> 2 & 1, set >> 3 & 1} << (4 + bit);
      }
      const int at = kPerBlock == 2 ? i / 4 : 0;
      out[i] = __builtin_convertvector(quants, V) * broadcast(d[at]) + broadcast(m[at]);
    }
  }
  // 32 numbers of e4m3 times d. As float16 the bits are 2^-8 of the value, with subnormals in their place.
  static void unpack_float8(const uint8_t* p, float d, V* out) {
    for (int i = 0; i < 8; ++i) {
      uint16_t halves[4];
      for (int j = 0; j < 4; ++j) halves[j] = (p[4 * i + j] & 0x80) << 8 | (p[4 * i + j] & 0x7f) << 7;
      out[i] = load_f16(halves) * broadcast(256 * d);
    }
  }
  static void unpack_bytes(const int8_t* p, float d, V* out) {
    for (int i = 0; i < 8; ++i) {
      const int8_t* b = p + 4 * i;
      const I bytes{b[0], b[1], b[2], b[3]};
      out[i] = __builtin_convertvector(bytes, V) * broadcast(d);
    }
  }
};

}  // namespace
}  // namespace jaxkv
