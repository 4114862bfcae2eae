// float32 to and from the two half-width formats, one number at a time, rounding to nearest even.
//
// Internal linkage throughout: files with different instruction sets include this, and the linker must not pick one
// file's copy for all.
#pragma once

#include <cstdint>
#include <cstring>

namespace jaxkv {
namespace {

static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float bf16_to_float(uint16_t value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }

static inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);  // a quiet NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float f16_to_float(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t rest = value & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x400u) return bits_to_float(sign | ((rest << 13) + (112u << 23)));
  const float tiny = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -tiny : tiny;
}

static inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (rest < 0x38800000u) {
    // Below the smallest normal: adding 0.5 puts the rounding where float16 has its last bit.
    const float shifted = bits_to_float(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

}  // namespace
}  // namespace jaxkv
