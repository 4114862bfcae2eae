// Tokens for the product with quantized weights: blocks of 32 numbers as exact integers.
//
// A token's block is rounded to integers of 24 bits times a power of two: the largest is kept to 2^-23 of itself. They
// are cut in three digits of eight bits, which are exact in bf16 as quants are; so are all sums of a block's digits times
// quants in float32, in any order. A block with a number that is not finite gives nan, and one whose numbers are all
// below 2^-100 counts as zeros.
#pragma once

#include <cstring>

#include "amx_unpack.h"

namespace jaxkv {
namespace {

constexpr int kDigits = 3;
constexpr int64_t kFewTokens = 4;  // are multiplied by vectors: their tiles would cost more than their products

// What makes the unsigned quants that the vector instruction takes of a kind's quants.
constexpr int quant_offset(WeightKind kind) {
  return kind == WeightKind::kQ8_0 ? 128 : row_kind(kind) == WeightKind::kQ4_0 ? 8 : 0;
}

// Tokens are cut in tiles of one height. Packed x is [tiles][blocks][digit, lowest first][height][row_bytes]: digits as
// bytes for few tokens, or as pairs of bf16, times their place. After all of it are the numbers of every block.
struct TokenTiles {
  TokenTiles(const WeightView& weight, int64_t tokens) {
    tiles = (tokens + kTileRows - 1) / kTileRows;
    const int64_t even = (tokens + tiles - 1) / tiles;
    height = even <= kFewTokens ? even : (even + 3) / 4 * 4;
    blocks = weight.in_features / kQuantBlock;
    row_bytes = is_few() ? kQuantBlock : 2 * kQuantBlock;
    numbers = is_few() ? kFewNumbers : 1;
  }
  bool is_few() const { return height <= kFewTokens; }
  int64_t block_bytes() const { return kDigits * height * row_bytes; }
  int64_t numbers_offset() const { return tiles * blocks * block_bytes() / 4; }
  int64_t floats() const { return numbers_offset() + tiles * blocks * numbers * height; }

  // Per block [numbers][height]: the sum of x; for few tokens then what the lower digits and the highest one count, and
  // for each digit, an integer, what takes the offset of the quants off its sum.
  static constexpr int64_t kFewNumbers = 3 + kDigits;
  int64_t tiles, height, blocks, row_bytes, numbers;
};

// A power of two that makes integers of 24 bits of numbers up to `largest`, with a highest digit below 128; or 0.
inline float integer_scale(float largest) {
  const float above = largest * (128.0f / 127.0f);
  uint32_t bits;
  std::memcpy(&bits, &above, sizeof bits);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  if (exponent < -100) return 0;
  bits = static_cast<uint32_t>(22 - exponent + 127) << 23;
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

// One block of one token: its digits, and its numbers `shape.height` apart.
inline void pack_block(const float* from, const TokenTiles& shape, int offset, char* to, float* numbers) {
  const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
  constexpr int kNotFinite = 0x99;
  const bool finite = !(_mm512_fpclass_ps_mask(low, kNotFinite) | _mm512_fpclass_ps_mask(high, kNotFinite));
  const float scale = integer_scale(_mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high))));
  float place = !finite ? __builtin_nanf("") : scale == 0 ? 0.0f : 1.0f / scale;
  __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(low, _mm512_set1_ps(scale)));
  __m512i m = _mm512_cvtps_epi32(_mm512_mul_ps(high, _mm512_set1_ps(scale)));
  numbers[0] = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
  if (shape.is_few()) {
    numbers[shape.height] = place;
    numbers[2 * shape.height] = place * 65536;
  }
  for (int digit = 0; digit < kDigits; ++digit, to += shape.height * shape.row_bytes, place *= 256) {
    const __m512i first = take_digit(&n), second = take_digit(&m);
    if (shape.is_few()) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(first));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_cvtepi32_epi8(second));
      const int32_t added = -offset * _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
      std::memcpy(&numbers[(3 + digit) * shape.height], &added, sizeof added);
    } else {
      const __m512 worth = _mm512_set1_ps(place);
      _mm512_store_si512(to, paired(_mm512_mul_ps(_mm512_cvtepi32_ps(first), worth),
                                    _mm512_mul_ps(_mm512_cvtepi32_ps(second), worth)));
    }
  }
}

int64_t amx_packed_size(const WeightView& weight, int64_t tokens) {
  if (!is_quantized(weight.kind)) return avx512_kernels().products.packed_size(weight, tokens);
  return TokenTiles(weight, tokens).floats();
}

void amx_pack(const WeightView& weight, const TokenRows& x, int64_t tokens, float* packed) {
  if (!is_quantized(weight.kind)) return avx512_kernels().products.pack(weight, x, tokens, packed);
  const TokenTiles shape(weight, tokens);
  alignas(64) static constexpr float kZeros[kQuantBlock] = {};
  float* numbers = packed + shape.numbers_offset();
  char* to = reinterpret_cast<char*>(packed);
  for (int64_t tile = 0; tile < shape.tiles; ++tile) {
    const int64_t first = tile * shape.height, present = tokens - first < shape.height ? tokens - first : shape.height;
    const float* rows = x(first, present);
    for (int64_t block = 0; block < shape.blocks; ++block) {
      for (int64_t row = 0; row < shape.height; ++row) {
        const float* from = row < present ? rows + row * weight.in_features + block * kQuantBlock : kZeros;
        pack_block(from, shape, quant_offset(weight.kind), to + row * shape.row_bytes, numbers + row);
      }
      to += shape.block_bytes();
      numbers += shape.numbers * shape.height;
    }
  }
}

}  // namespace
}  // namespace jaxkv
