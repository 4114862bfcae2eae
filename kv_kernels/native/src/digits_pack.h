// Tokens as digits in bytes, for the product on vectors of bytes.
#pragma once

#include "digits.h"
#include "quant_unpack.h"

namespace jaxkv {
namespace {

// What is added to a kind's quants for the unsigned ones that the vector instruction takes. With one digit, quants that come
// with a min count as signed ones too, from -8 to 7: what is then left of the min is small.
constexpr int quant_offset(WeightKind kind, int digits) {
  if (kind == WeightKind::kQ8_0) return 128;
  return row_kind(kind) == WeightKind::kQ4_0 || digits == kByteDigits ? 8 : 0;
}

// Numbers of two blocks each, rounded to bf16: those of blocks 2i and 2i + 1 as the low and the high half of number 2i.
inline __m512i paired_blocks(__m512 even, __m512 odd) {
  const auto halves = [](__m512 numbers) {
    return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(numbers)));
  };
  return _mm512_or_si512(halves(even), _mm512_slli_epi32(halves(odd), 16));
}

// Tokens are cut in tiles of about equal height. Packed x is [tiles][blocks][digit, highest first][height][32 bytes], and
// after all of it are the numbers of every block, [tiles][blocks][numbers][height].
template <int kDigits>
struct DigitTokens {
  // Tokens of a tile, whose sums with two tiles of outputs stay in registers.
  static constexpr int64_t kMostTokens = 6;
  static constexpr int64_t kTokenBlockBytes = kDigits * kQuantBlock;
  // The sum of x, with one digit that of this block and the next as a pair of bf16; what the two lowest digits, or the only
  // one, count; an integer that takes the offset of the quants off their sum; and the last two for the third digit, if there
  // is one.
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

// A token, with `height` tokens side by side; its digits and numbers in the first block.
template <int kDigits>
inline void pack_digits(const float* row, int64_t blocks, int64_t height, int offset, char* to, float* numbers) {
  const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
  for (int64_t first = 0; first < blocks; first += 16) {
    const int64_t count = blocks - first < 16 ? blocks - first : 16;
    const BlockSteps<kDigits> steps(row, count);
    __m512i lower[16], third[16], sums[16];  // of every block, of its numbers i and i + 16
    for (int64_t block = 0; block < count; ++block, row += kQuantBlock, to += height * kDigits * kQuantBlock) {
      const __m512 low = _mm512_loadu_ps(row), high = _mm512_loadu_ps(row + 16);
      const __m512 scale = _mm512_set1_ps(steps.scales[block]);
      const __mmask16 kept = steps.finite >> block & 1 ? 0xffff : 0;  // or sums of digits could overflow
      __m512i n = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(low, scale));
      __m512i m = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(high, scale));
      lower[block] = _mm512_add_epi32(n, m);
#pragma GCC unroll 3
      for (int digit = 0; digit < kDigits; ++digit) {
        const bool is_last = digit == kDigits - 1;
        char* bytes = to + (kDigits - 1 - digit) * height * kQuantBlock;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(is_last ? n : take_digit(&n)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16), _mm512_cvtepi32_epi8(is_last ? m : take_digit(&m)));
      }
      if constexpr (kDigits == kFloatDigits) {
        third[block] = _mm512_add_epi32(n, m);
        lower[block] = _mm512_sub_epi32(lower[block], _mm512_slli_epi32(third[block], 16));
        sums[block] = _mm512_castps_si512(_mm512_add_ps(low, high));
      }
    }
    for (int64_t block = count; block < 16; ++block) lower[block] = third[block] = sums[block] = _mm512_setzero_si512();
    const __m512i total = reduce_each(lower, add), minus = _mm512_set1_epi32(-offset);
    const __m512 place = _mm512_load_ps(steps.places);
    alignas(64) float found[5][16];
    if constexpr (kDigits == kFloatDigits) {
      _mm512_store_si512(found[0], reduce_each(sums, [](__m512i a, __m512i b) {
        return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
      }));
      _mm512_store_ps(found[3], _mm512_mul_ps(place, _mm512_set1_ps(65536)));
      _mm512_store_si512(found[4], _mm512_mullo_epi32(minus, reduce_each(third, add)));
    } else {
      const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(total), place);
      const __m512 next = _mm512_permute_ps(sum, 0b10110001);
      _mm512_store_ps(found[0], kDigits == kByteDigits ? _mm512_castsi512_ps(paired_blocks(sum, next)) : sum);
    }
    _mm512_store_ps(found[1], place);
    _mm512_store_si512(found[2], _mm512_mullo_epi32(minus, total));
    for (int64_t block = 0; block < count; ++block)
      for (int64_t which = 0; which < DigitTokens<kDigits>::kNumbers; ++which, numbers += height)
        *numbers = found[which][block];
  }
}

template <int kDigits>
int64_t digits_packed_size(const WeightView& weight, int64_t tokens) {
  return DigitTokens<kDigits>(weight, tokens).floats();
}

template <int kDigits>
void digits_pack(const WeightView& weight, const TokenRows& x, int64_t tokens, Part part, float* packed) {
  const DigitTokens<kDigits> shape(weight, tokens);
  const int offset = quant_offset(weight.kind, kDigits);
  for (int64_t tile = part.begin(shape.tiles); tile < part.end(shape.tiles); ++tile) {
    const int64_t height = shape.height(tile);
    const float* rows = x(shape.first_token(tile), height);
    char* to = reinterpret_cast<char*>(packed) + shape.digits_offset(tile, 0);
    float* numbers = packed + shape.numbers_offset(tile, 0);
    for (int64_t row = 0; row < height; ++row)
      pack_digits<kDigits>(rows + row * weight.in_features, shape.blocks, height, offset, to + row * kQuantBlock,
                           numbers + row);
  }
}

}  // namespace
}  // namespace jaxkv
