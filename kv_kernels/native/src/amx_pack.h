// Tokens for the product with quantized weights on tiles: their digits, which are exact in bf16 as quants are. So are all
// sums of a block's digits times quants in float32, in any order.
#pragma once

#include <cstring>

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

// One block of one token, an integer of it being `scale` times a number: its digits `height` rows apart. Gives the sum of
// its numbers.
inline float pack_pairs(const float* from, float scale, float place, __mmask16 kept, int64_t height, char* to) {
  const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
  __m512i n = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(low, _mm512_set1_ps(scale)));
  __m512i m = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(high, _mm512_set1_ps(scale)));
#pragma GCC unroll 3
  for (int digit = 0; digit < kFloatDigits; ++digit, to += height * 2 * kQuantBlock, place *= 256) {
    const bool is_last = digit == kFloatDigits - 1;
    const __m512 worth = _mm512_set1_ps(place);
    _mm512_store_si512(to, paired(_mm512_mul_ps(_mm512_cvtepi32_ps(is_last ? n : take_digit(&n)), worth),
                                  _mm512_mul_ps(_mm512_cvtepi32_ps(is_last ? m : take_digit(&m)), worth)));
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(low, high));
}

int64_t amx_packed_size(const WeightView& weight, int64_t tokens) {
  if (!has_integers(weight.kind)) return avx512_kernels().products.packed_size(weight, tokens);
  if (tokens <= kFewTokens) return digits_packed_size<kFloatDigits>(weight, tokens);
  return TokenTiles(weight, tokens).floats();
}

void amx_pack(const WeightView& weight, const TokenRows& x, int64_t tokens, Part part, float* packed) {
  if (!has_integers(weight.kind)) return avx512_kernels().products.pack(weight, x, tokens, part, packed);
  if (tokens <= kFewTokens) return digits_pack<kFloatDigits>(weight, x, tokens, part, packed);
  const TokenTiles shape(weight, tokens);
  const int64_t row_bytes = 2 * kQuantBlock;
  for (int64_t tile = part.begin(shape.tiles); tile < part.end(shape.tiles); ++tile) {
    float* sums = packed + shape.sums_offset() + tile * shape.blocks * shape.height;
    char* to = reinterpret_cast<char*>(packed) + tile * shape.blocks * shape.block_bytes();
    const int64_t first = tile * shape.height, present = tokens - first < shape.height ? tokens - first : shape.height;
    const float* rows = x(first, present);
    if (present < shape.height) {
      std::memset(to, 0, static_cast<size_t>(shape.blocks * shape.block_bytes()));
      std::memset(sums, 0, static_cast<size_t>(shape.blocks * shape.height) * sizeof(float));
    }
    for (int64_t row = 0; row < present; ++row) {
      const float* from = rows + row * weight.in_features;
      for (int64_t run = 0; run < shape.blocks; run += 16) {
        const int64_t count = shape.blocks - run < 16 ? shape.blocks - run : 16;
        const BlockSteps<kFloatDigits> steps(from, count);
        for (int64_t i = 0; i < count; ++i, from += kQuantBlock) {
          const __mmask16 kept = steps.finite >> i & 1 ? 0xffff : 0;  // or sums of digits could overflow
          char* block = to + (run + i) * shape.block_bytes() + row * row_bytes;
          sums[(run + i) * shape.height + row] =
              pack_pairs(from, steps.scales[i], steps.places[i], kept, shape.height, block);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxkv
