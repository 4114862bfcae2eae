// Tokens for the product with quantized weights on tiles: their digits, which are exact in bf16 as quants are. So are all
// sums of a block's digits times quants in float32, in any order.
#pragma once

#include "amx_unpack.h"
#include "digits_pack.h"

namespace jaxkv {
namespace {

constexpr int64_t kFewTokens = 4;  // are multiplied by vectors: their tiles would cost more than their products

// More tokens are cut in tiles of one height. Packed x is [tiles][blocks][digit, lowest first][height][32 bf16]: pairs of
// digits, times their place. After all of it are the sums of x of every block, [tiles][blocks][height].
struct TokenTiles {
  TokenTiles(const WeightView& weight, int64_t tokens) {
    tiles = (tokens + kTileRows - 1) / kTileRows;
    const int64_t even = (tokens + tiles - 1) / tiles;
    height = (even + 3) / 4 * 4;
    blocks = weight.in_features / kQuantBlock;
  }
  int64_t block_bytes() const { return kFloatDigits * height * 2 * kQuantBlock; }
  int64_t sums_offset() const { return tiles * blocks * block_bytes() / 4; }
  int64_t floats() const { return sums_offset() + tiles * blocks * height; }

  int64_t tiles, height, blocks;
};

// One block of one token: its digits `height` rows apart.
inline float pack_pairs(const float* from, int64_t height, char* to) {
  const BlockDigits<kFloatDigits> block(from);
  float place = block.place;
#pragma GCC unroll 3
  for (int digit = 0; digit < kFloatDigits; ++digit, to += height * 2 * kQuantBlock, place *= 256) {
    const __m512 worth = _mm512_set1_ps(place);
    _mm512_store_si512(to, paired(_mm512_mul_ps(_mm512_cvtepi32_ps(block.digits[digit][0]), worth),
                                  _mm512_mul_ps(_mm512_cvtepi32_ps(block.digits[digit][1]), worth)));
  }
  return block.sum;
}

int64_t amx_packed_size(const WeightView& weight, int64_t tokens) {
  if (!has_integers(weight.kind)) return avx512_kernels().products.packed_size(weight, tokens);
  if (tokens <= kFewTokens) return digits_packed_size<kFloatDigits>(weight, tokens);
  return TokenTiles(weight, tokens).floats();
}

void amx_pack(const WeightView& weight, const TokenRows& x, int64_t tokens, float* packed) {
  if (!has_integers(weight.kind)) return avx512_kernels().products.pack(weight, x, tokens, packed);
  if (tokens <= kFewTokens) return digits_pack<kFloatDigits>(weight, x, tokens, packed);
  const TokenTiles shape(weight, tokens);
  alignas(64) static constexpr float kZeros[kQuantBlock] = {};
  float* sums = packed + shape.sums_offset();
  char* to = reinterpret_cast<char*>(packed);
  for (int64_t tile = 0; tile < shape.tiles; ++tile) {
    const int64_t first = tile * shape.height, present = tokens - first < shape.height ? tokens - first : shape.height;
    const float* rows = x(first, present);
    for (int64_t block = 0; block < shape.blocks; ++block) {
      for (int64_t row = 0; row < shape.height; ++row) {
        const float* from = row < present ? rows + row * weight.in_features + block * kQuantBlock : kZeros;
        sums[row] = pack_pairs(from, shape.height, to + row * 2 * kQuantBlock);
      }
      to += shape.block_bytes();
      sums += shape.height;
    }
  }
}

}  // namespace
}  // namespace jaxkv
