// Tokens as digits in bytes, for the product on vectors of bytes.
#pragma once

#include "digits.h"
#include "quant_unpack.h"

namespace jaxkv {
namespace {

// What makes the unsigned quants that the vector instruction takes of a kind's quants.
constexpr int quant_offset(WeightKind kind) {
  return kind == WeightKind::kQ8_0 ? 128 : row_kind(kind) == WeightKind::kQ4_0 ? 8 : 0;
}

// Tokens are cut in tiles of about equal height. Packed x is [tiles][blocks][digit, highest first][height][32 bytes], and
// after all of it are the numbers of every block, [tiles][blocks][numbers][height].
template <int kDigits>
struct DigitTokens {
  // Tokens of a tile, whose sums with two tiles of outputs stay in registers.
  static constexpr int64_t kMostTokens = 6;
  static constexpr int64_t kTokenBlockBytes = kDigits * kQuantBlock;
  // The sum of x; what the two lowest digits, or the only one, count; an integer that takes the offset of the quants off
  // their sum; and the last two for the third digit, if there is one.
  static constexpr int64_t kNumbers = kDigits == kFloatDigits ? 5 : 3;

  DigitTokens(const WeightView& weight, int64_t tokens_)
      : tokens(tokens_), tiles((tokens + kMostTokens - 1) / kMostTokens), blocks(weight.in_features / kQuantBlock) {}
  int64_t first_token(int64_t tile) const { return tokens * tile / tiles; }
  int64_t height(int64_t tile) const { return first_token(tile + 1) - first_token(tile); }
  int64_t floats() const { return tokens * blocks * (kTokenBlockBytes / 4 + kNumbers); }
  int64_t digits_offset(int64_t tile, int64_t block) const {
    return (first_token(tile) * blocks + height(tile) * block) * kTokenBlockBytes;
  }
  int64_t numbers_offset(int64_t tile, int64_t block) const {
    return tokens * blocks * kTokenBlockBytes / 4 + (first_token(tile) * blocks + height(tile) * block) * kNumbers;
  }
  int64_t tokens, tiles, blocks;
};

// One block of one token, with `height` tokens side by side.
template <int kDigits>
inline void pack_digits(const float* from, int64_t height, int offset, char* to, float* numbers) {
  const BlockDigits<kDigits> block(from);
#pragma GCC unroll 3
  for (int digit = 0; digit < kDigits; ++digit) {
    char* bytes = to + (kDigits - 1 - digit) * height * kQuantBlock;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(block.digits[digit][0]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16), _mm512_cvtepi32_epi8(block.digits[digit][1]));
  }
  const auto store = [&](int which, int32_t number) { std::memcpy(&numbers[which * height], &number, sizeof number); };
  numbers[0] = block.sum;
  numbers[height] = block.place;
  store(2, offset == 0 ? 0 : -offset * block.lower_sum());
  if constexpr (kDigits == kFloatDigits) {
    numbers[3 * height] = block.place * 65536;
    store(4, offset == 0 ? 0 : -offset * block.digit_sum(2));
  }
}

template <int kDigits>
int64_t digits_packed_size(const WeightView& weight, int64_t tokens) {
  return DigitTokens<kDigits>(weight, tokens).floats();
}

template <int kDigits>
void digits_pack(const WeightView& weight, const TokenRows& x, int64_t tokens, float* packed) {
  const DigitTokens<kDigits> shape(weight, tokens);
  const int offset = quant_offset(weight.kind);
  for (int64_t tile = 0; tile < shape.tiles; ++tile) {
    const int64_t height = shape.height(tile);
    const float* rows = x(shape.first_token(tile), height);
    char* to = reinterpret_cast<char*>(packed) + shape.digits_offset(tile, 0);
    float* numbers = packed + shape.numbers_offset(tile, 0);
    for (int64_t block = 0; block < shape.blocks; ++block) {
      for (int64_t row = 0; row < height; ++row) {
        const float* from = rows + row * weight.in_features + block * kQuantBlock;
        pack_digits<kDigits>(from, height, offset, to + row * kQuantBlock, numbers + row);
      }
      to += height * shape.kTokenBlockBytes;
      numbers += height * shape.kNumbers;
    }
  }
}

}  // namespace
}  // namespace jaxkv
