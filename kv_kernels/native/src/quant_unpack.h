// Sixteen outputs of a quantized weight over a block of 32 elements, as the bytes that a product reads, and their scales.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace jaxkv {
namespace {

constexpr int64_t kTileOutputs = WeightTile::kRows;
constexpr int64_t kScaleRun = 8;     // scales of a row that are read together
constexpr int64_t kBlockVectors = 8;  // of a block

// Calls `use` with a kind that has integers as a constant.
template <class F>
inline void with_integers(WeightKind kind, F use) {
  switch (kind) {
    case WeightKind::kQ8_0: return use(std::integral_constant<WeightKind, WeightKind::kQ8_0>());
    case WeightKind::kQ4_0: return use(std::integral_constant<WeightKind, WeightKind::kQ4_0>());
    case WeightKind::kQ4_1: return use(std::integral_constant<WeightKind, WeightKind::kQ4_1>());
    case WeightKind::kQ4_0Tiles: return use(std::integral_constant<WeightKind, WeightKind::kQ4_0Tiles>());
    case WeightKind::kQ4_1Tiles: return use(std::integral_constant<WeightKind, WeightKind::kQ4_1Tiles>());
    default: return use(std::integral_constant<WeightKind, WeightKind::kNibbles>());
  }
}
constexpr int64_t block_bytes(WeightKind kind) { return kind == WeightKind::kQ8_0 ? 32 : 16; }

inline __m128i load_16_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// Sixteen bytes of sixteen rows, of rows i, 4 + i, 8 + i and 12 + i in v[i]: number o of out[q] has bytes 4q to 4q + 3 of
// row o.
inline __attribute__((always_inline)) void turn(const __m512i* v, __m512i* out) {
  const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  out[0] = _mm512_unpacklo_epi64(a, c);
  out[1] = _mm512_unpackhi_epi64(a, c);
  out[2] = _mm512_unpacklo_epi64(b, d);
  out[3] = _mm512_unpackhi_epi64(b, d);
}

// Vectors of a block's quants as they are kept for a product: those of four bits two to a byte, so that half as much goes
// through the first-level cache.
constexpr int64_t kept_vectors(WeightKind kind) { return kind == WeightKind::kQ8_0 ? 8 : 4; }

template <class Rows>
inline __attribute__((always_inline)) void keep_quants(const Rows& rows, int64_t block, __m512i* kept) {
  rows.turned_quants(block, 0, kept);
  if constexpr (Rows::kKind == WeightKind::kQ8_0) rows.turned_quants(block, 1, kept + 4);
}

// Vector i of kBlockVectors of a block as bytes, quants raised by the kind's offset: number o has elements 4i to 4i + 3 of
// output o.
template <WeightKind kKind>
inline __attribute__((always_inline)) __m512i unsigned_quants(const __m512i* kept, int i) {
  if constexpr (kKind == WeightKind::kQ8_0) return _mm512_xor_si512(kept[i], _mm512_set1_epi8(-128));
  const __m512i at_low_bits = i < 4 ? kept[i] : _mm512_srli_epi16(kept[i - 4], 4);
  return _mm512_and_si512(at_low_bits, _mm512_set1_epi8(15));
}

// Scales (or mins) of blocks [first, first + blocks), at most kScaleRun, of sixteen rows that are `row_blocks` long:
// out [blocks][16].
inline void turn_scales(const uint16_t* const* rows, int64_t row_blocks, int64_t first, int64_t blocks, float* out) {
  alignas(64) static constexpr uint16_t kFourRows[32] = {0, 8,  16, 24, 1, 9,  17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
                                                         4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31};
  const __m512i order = _mm512_load_si512(kFourRows);
  // A whole run is read wherever the row has one, from further left at its end.
  const int64_t readable = row_blocks < kScaleRun ? row_blocks : kScaleRun;
  const int64_t start = first + readable <= row_blocks ? first : row_blocks - readable;
  __m512i v[4];
  const auto read = [&](auto row) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm512_castsi128_si512(row(4 * i));
      v[i] = _mm512_inserti32x4(v[i], row(4 * i + 1), 1);
      v[i] = _mm512_inserti32x4(v[i], row(4 * i + 2), 2);
      v[i] = _mm512_inserti32x4(v[i], row(4 * i + 3), 3);
      v[i] = _mm512_permutexvar_epi16(order, v[i]);
    }
  };
  if (readable == kScaleRun) {
    read([&](int i) { return load_16_bytes(rows[i] + start); });
  } else {
    const __mmask8 present = static_cast<__mmask8>((1 << readable) - 1);
    read([&](int i) { return _mm_maskz_loadu_epi16(present, rows[i]); });
  }
  // Even and odd blocks of rows 0 to 7, and of rows 8 to 15.
  alignas(64) __m128i eights[2][2][4];
  _mm512_store_si512(eights[0][0], _mm512_unpacklo_epi64(v[0], v[1]));
  _mm512_store_si512(eights[1][0], _mm512_unpackhi_epi64(v[0], v[1]));
  _mm512_store_si512(eights[0][1], _mm512_unpacklo_epi64(v[2], v[3]));
  _mm512_store_si512(eights[1][1], _mm512_unpackhi_epi64(v[2], v[3]));
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t at = first + block - start;
    const __m256i halves = _mm256_set_m128i(eights[at % 2][1][at / 2], eights[at % 2][0][at / 2]);
    _mm512_store_ps(out + 16 * block, _mm512_cvtph_ps(halves));
  }
}

// Where byte [block][row] lies in [row][block], four blocks a vector.
struct ByBlock {
  alignas(64) uint8_t bytes[2][64] = {};
  constexpr ByBlock() {
    for (int i = 0; i < 128; ++i) bytes[i / 64][i % 64] = static_cast<uint8_t>(i % 16 * kScaleRun + i / 16);
  }
};
constexpr ByBlock kByBlock;

// Bytes of blocks [first, first + blocks), at most kScaleRun, of sixteen rows that are `row_blocks` long: [blocks][16].
inline void transpose_factors(const int8_t* factors, const int64_t* rows, int64_t row_blocks, int64_t first,
                              int64_t blocks, int8_t (*out)[kTileOutputs]) {
  alignas(64) int8_t bytes[kTileOutputs][kScaleRun] = {};
  for (int64_t i = 0; i < kTileOutputs; ++i)
    std::memcpy(bytes[i], factors + rows[i] * row_blocks + first, static_cast<size_t>(blocks));
  const __m512i low = _mm512_load_si512(bytes[0]), high = _mm512_load_si512(bytes[8]);
  for (int half = 0; half < 2; ++half)
    _mm512_store_si512(out[4 * half], _mm512_permutex2var_epi8(low, _mm512_load_si512(kByBlock.bytes[half]), high));
}

// The numbers of a group, times their factors, for blocks [first, first + blocks), at most kScaleRun: out [blocks][16].
inline void unpack_group_numbers(const GroupNumbers& from, const int64_t* rows, int64_t row_blocks, int64_t first,
                                 int64_t blocks, float* out) {
  alignas(64) int8_t factors[kScaleRun][kTileOutputs];
  if (from.factors != nullptr) transpose_factors(from.factors, rows, row_blocks, first, blocks, factors);
  const int64_t row_groups = row_blocks / from.group_blocks;
  int64_t group = -1;
  __m512 numbers = _mm512_setzero_ps();
  for (int64_t block = 0; block < blocks; ++block) {
    if (group != (first + block) / from.group_blocks) {
      group = (first + block) / from.group_blocks;
      alignas(64) float wide[kTileOutputs];
      alignas(32) uint16_t narrow[kTileOutputs];
      if (from.type == Element::kF32) {
        for (int64_t i = 0; i < kTileOutputs; ++i)
          wide[i] = static_cast<const float*>(from.numbers)[rows[i] * row_groups + group];
        numbers = _mm512_load_ps(wide);
      } else {
        for (int64_t i = 0; i < kTileOutputs; ++i)
          narrow[i] = static_cast<const uint16_t*>(from.numbers)[rows[i] * row_groups + group];
        numbers = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(narrow)));
      }
    }
    __m512 result = numbers;
    if (from.factors != nullptr) {
      const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(factors[block]));
      result = _mm512_mul_ps(numbers, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
    }
    _mm512_store_ps(out + kTileOutputs * block, result);
  }
}

}  // namespace
}  // namespace jaxkv
