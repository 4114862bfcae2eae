// The product with quantized weights: exact integers, on tiles of bf16 or on vectors of bytes.
//
// A block's sums of digits times quants are exact, so what tiles and vectors make of them is one number: the digits'
// sums, added from the lowest on. Then acc = sum * scale + acc, acc = sum of x * min + acc, block by block.
#pragma once

#include <cstring>

#include "amx_rows.h"

namespace jaxkv {
namespace {

constexpr int64_t kBlockTiles = kOutputBlock / kTileOutputs;
constexpr int64_t kRunBlocks = 3;  // blocks that pass through the tiles together

// A product of some tokens with sixteen outputs over blocks [first, first + blocks): results [height][kOutputBlock] are
// added to, or begun where first is 0.
template <int kHeight>
inline void load_results(int64_t first, const float* results, __m512* acc) {
#pragma GCC unroll 16
  for (int t = 0; t < kHeight; ++t) {
    acc[t] = first == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(results + t * kOutputBlock);
  }
}
template <int kHeight>
inline void store_results(const __m512* acc, float* results) {
#pragma GCC unroll 16
  for (int t = 0; t < kHeight; ++t) _mm512_storeu_ps(results + t * kOutputBlock, acc[t]);
}

// On vectors, weights unpacked in registers.
template <WeightKind kKind, int kHeight>
inline void multiply_few(const TileRows<kKind>& rows, int64_t first, int64_t blocks, Unpacked* weight, const char* x,
                         const float* numbers, float* results) {
  __m512 acc[kHeight];
  load_results<kHeight>(first, results, acc);
  rows.unpack_scales(first, blocks, weight->scales, weight->mins);
  for (int64_t block = 0; block < blocks; ++block, numbers += TokenTiles::kFewNumbers * kHeight) {
    __m512i values[kBlockVectors];
    rows.prefetch_ahead(first + block, 1);
    unpack_unsigned(rows, first + block, values);
#pragma GCC unroll 4
    for (int t = 0; t < kHeight; ++t) {
      __m512i sums[kDigits];
#pragma GCC unroll 3
      for (int digit = 0; digit < kDigits; ++digit) {
        const char* bytes = x + ((block * kDigits + digit) * kHeight + t) * kQuantBlock;
        sums[digit] = _mm512_castps_si512(_mm512_set1_ps(numbers[(3 + digit) * kHeight + t]));
#pragma GCC unroll 8
        for (int i = 0; i < kBlockVectors; ++i) {
          int32_t four;
          std::memcpy(&four, bytes + 4 * i, sizeof four);
          sums[digit] = _mm512_dpbusd_epi32(sums[digit], values[i], _mm512_set1_epi32(four));
        }
      }
      const __m512i lower = _mm512_add_epi32(_mm512_slli_epi32(sums[1], 8), sums[0]);
      const __m512 highest = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[2]), _mm512_set1_ps(numbers[2 * kHeight + t]));
      const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(lower), _mm512_set1_ps(numbers[kHeight + t]), highest);
      acc[t] = _mm512_fmadd_ps(_mm512_load_ps(weight->scales[block]), sum, acc[t]);
      if constexpr (has_mins(kKind)) {
        acc[t] = _mm512_fmadd_ps(_mm512_load_ps(weight->mins[block]), _mm512_set1_ps(numbers[t]), acc[t]);
      }
    }
  }
  store_results<kHeight>(acc, results);
}

// What two tiles of tokens make of two tiles of outputs, for a run of blocks; or one of either.
template <int kHeight>
using BlockSums = float[kRunBlocks][2][2][kHeight * kTileOutputs];

// Digits of x times weights, block by block: sums[block][token tile][output tile]. Token tiles are `x_stride` bytes apart.
template <int kHeight, int kTokenTiles, int kOutputTiles>
inline void sum_blocks(const Unpacked* weights, int64_t blocks, const char* x, int64_t x_stride,
                       BlockSums<kHeight>& sums) {
  constexpr int64_t kDigitBytes = kHeight * 2 * kQuantBlock;
  for (int64_t block = 0; block < blocks; ++block) {
    tile_load<kWeightTile>(weights[0].tiles[block]);
    tile_zero<kSumTile>();
    if constexpr (kOutputTiles > 1) {
      tile_load<kWeightTile + 1>(weights[1].tiles[block]);
      tile_zero<kSumTile + 1>();
    }
    if constexpr (kTokenTiles > 1) tile_zero<kSumTile + 2>();
    if constexpr (kTokenTiles > 1 && kOutputTiles > 1) tile_zero<kSumTile + 3>();
#pragma GCC unroll 3
    for (int digit = 0; digit < kDigits; ++digit, x += kDigitBytes) {
      tile_load<kXTile>(x);
      tile_multiply<kSumTile, kXTile, kWeightTile>();
      if constexpr (kOutputTiles > 1) tile_multiply<kSumTile + 1, kXTile, kWeightTile + 1>();
      if constexpr (kTokenTiles > 1) {
        tile_load<kXTile + 1>(x + x_stride);
        tile_multiply<kSumTile + 2, kXTile + 1, kWeightTile>();
        if constexpr (kOutputTiles > 1) tile_multiply<kSumTile + 3, kXTile + 1, kWeightTile + 1>();
      }
    }
    tile_store<kSumTile>(sums[block][0][0]);
    if constexpr (kOutputTiles > 1) tile_store<kSumTile + 1>(sums[block][0][1]);
    if constexpr (kTokenTiles > 1) tile_store<kSumTile + 2>(sums[block][1][0]);
    if constexpr (kTokenTiles > 1 && kOutputTiles > 1) tile_store<kSumTile + 3>(sums[block][1][1]);
  }
}

// A run's sums of one tile of tokens and one of outputs, scaled, to its results [height][kOutputBlock]: added to them, or
// their beginning where the run is the first.
template <WeightKind kKind, int kHeight>
inline void add_sums(const Unpacked& weight, bool is_first, int64_t blocks, const BlockSums<kHeight>& sums, int token_tile,
                     int output_tile, const float* x_sums, float* results) {
  __m512 acc[kHeight];
  load_results<kHeight>(is_first ? 0 : 1, results, acc);
  for (int64_t block = 0; block < blocks; ++block) {
    const float* from = sums[block][token_tile][output_tile];
    const __m512 scale = _mm512_load_ps(weight.scales[block]);
#pragma GCC unroll 16
    for (int t = 0; t < kHeight; ++t) acc[t] = _mm512_fmadd_ps(scale, _mm512_load_ps(from + kTileOutputs * t), acc[t]);
    if constexpr (has_mins(kKind)) {
      const __m512 min = _mm512_load_ps(weight.mins[block]);
#pragma GCC unroll 16
      for (int t = 0; t < kHeight; ++t)
        acc[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(x_sums[block * kHeight + t]), acc[t]);
    }
  }
  store_results<kHeight>(acc, results);
}

// Packed x of a block of tokens: where a tile's run of blocks begins, and its sums.
template <int kHeight>
struct PackedTiles {
  const TokenTiles& shape;
  const float* packed;

  const char* digits(int64_t tile, int64_t block) const {
    return reinterpret_cast<const char*>(packed) + (tile * shape.blocks + block) * shape.block_bytes();
  }
  const float* numbers(int64_t tile, int64_t block) const {
    return packed + shape.numbers_offset() + (tile * shape.blocks + block) * shape.numbers * kHeight;
  }
};

template <WeightKind kKind, int kHeight, int kTokenTiles, int kOutputTiles>
inline void multiply_tiles(const Unpacked* weights, int64_t first, int64_t blocks, const PackedTiles<kHeight>& x,
                           int64_t tile, float* results) {
  alignas(64) BlockSums<kHeight> sums;
  sum_blocks<kHeight, kTokenTiles, kOutputTiles>(weights, blocks, x.digits(tile, first),
                                                 x.digits(1, 0) - x.digits(0, 0), sums);
#pragma GCC unroll 2
  for (int token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma GCC unroll 2
    for (int output_tile = 0; output_tile < kOutputTiles; ++output_tile) {
      add_sums<kKind, kHeight>(weights[output_tile], first == 0, blocks, sums, token_tile, output_tile,
                               x.numbers(tile + token_tile, first),
                               results + (tile + token_tile) * kHeight * kOutputBlock + output_tile * kTileOutputs);
    }
  }
}

// On tiles, a run of blocks at a time: short enough that its weights, x and sums stay in the first-level cache.
template <WeightKind kKind, int kHeight>
void multiply_by_tiles(const TileRows<kKind>* rows, int64_t output_tiles, const PackedTiles<kHeight>& x, float* results) {
  Unpacked unpacked[kBlockTiles];
  // Few tiles of tokens do little with what is unpacked: fewer rows are then read at a time, each nearly end to end.
  const int64_t together = x.shape.tiles > 2 ? kBlockTiles : 2;
  for (int64_t output = 0; output < output_tiles; output += together) {
    const int64_t last = output + together < output_tiles ? output + together : output_tiles;
    for (int64_t first = 0; first < x.shape.blocks; first += kRunBlocks) {
      const int64_t blocks = x.shape.blocks - first < kRunBlocks ? x.shape.blocks - first : kRunBlocks;
      for (int64_t i = output; i < last; ++i) {
        rows[i].unpack_scales(first, blocks, unpacked[i].scales, unpacked[i].mins);
        for (int64_t block = 0; block < blocks; ++block) {
          rows[i].prefetch_ahead(first + block, together);
          unpack_tile(rows[i], first + block, unpacked[i].tiles[block]);
        }
      }
      for (int64_t tile = 0; tile < x.shape.tiles; tile += 2) {
        const bool two_tokens = tile + 1 < x.shape.tiles;
        for (int64_t i = output; i < last; i += 2) {
          const bool two_outputs = i + 1 < last;
          float* to = results + i * kTileOutputs;
          if (two_tokens && two_outputs) {
            multiply_tiles<kKind, kHeight, 2, 2>(&unpacked[i], first, blocks, x, tile, to);
          } else if (two_tokens) {
            multiply_tiles<kKind, kHeight, 2, 1>(&unpacked[i], first, blocks, x, tile, to);
          } else if (two_outputs) {
            multiply_tiles<kKind, kHeight, 1, 2>(&unpacked[i], first, blocks, x, tile, to);
          } else {
            multiply_tiles<kKind, kHeight, 1, 1>(&unpacked[i], first, blocks, x, tile, to);
          }
        }
      }
    }
  }
}

template <WeightKind kKind, int kHeight>
void multiply_all(const WeightView& weight, const float* packed, const TokenTiles& shape, int64_t first_output,
                  int64_t outputs, float* results) {
  TileRows<kKind> rows[kBlockTiles];
  const int64_t output_tiles = (outputs + kTileOutputs - 1) / kTileOutputs;
  for (int64_t i = 0; i < output_tiles; ++i) rows[i] = TileRows<kKind>(weight, first_output + i * kTileOutputs);
  const PackedTiles<kHeight> x{shape, packed};
  if constexpr (kHeight > kFewTokens) {
    multiply_by_tiles<kKind, kHeight>(rows, output_tiles, x, results);
  } else {
    Unpacked unpacked;
    for (int64_t i = 0; i < output_tiles; ++i) {
      for (int64_t first = 0; first < shape.blocks; first += kScaleRun) {
        const int64_t blocks = shape.blocks - first < kScaleRun ? shape.blocks - first : kScaleRun;
        multiply_few<kKind, kHeight>(rows[i], first, blocks, &unpacked, x.digits(0, first), x.numbers(0, first),
                                     results + i * kTileOutputs);
      }
    }
  }
}

template <WeightKind kKind>
void multiply_kind(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                   float* results) {
  const TokenTiles shape(weight, tokens);
  switch (shape.height) {
    case 1: return multiply_all<kKind, 1>(weight, packed, shape, first_output, outputs, results);
    case 2: return multiply_all<kKind, 2>(weight, packed, shape, first_output, outputs, results);
    case 3: return multiply_all<kKind, 3>(weight, packed, shape, first_output, outputs, results);
    case 4: return multiply_all<kKind, 4>(weight, packed, shape, first_output, outputs, results);
  }
  const TileSize by_token{shape.height, 64}, weights{kTileRows, 64};
  const TileShape tiles({by_token, by_token, by_token, by_token, weights, weights, by_token, by_token});
  switch (shape.height) {
    case 8: return multiply_all<kKind, 8>(weight, packed, shape, first_output, outputs, results);
    case 12: return multiply_all<kKind, 12>(weight, packed, shape, first_output, outputs, results);
    case 16: return multiply_all<kKind, 16>(weight, packed, shape, first_output, outputs, results);
  }
}

void amx_product(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                 float* results) {
  switch (weight.kind) {
    case WeightKind::kQ8_0:
      return multiply_kind<WeightKind::kQ8_0>(weight, packed, tokens, first_output, outputs, results);
    case WeightKind::kQ4_0:
      return multiply_kind<WeightKind::kQ4_0>(weight, packed, tokens, first_output, outputs, results);
    case WeightKind::kQ4_1:
      return multiply_kind<WeightKind::kQ4_1>(weight, packed, tokens, first_output, outputs, results);
    case WeightKind::kQ4_0Tiles:
      return multiply_kind<WeightKind::kQ4_0Tiles>(weight, packed, tokens, first_output, outputs, results);
    case WeightKind::kQ4_1Tiles:
      return multiply_kind<WeightKind::kQ4_1Tiles>(weight, packed, tokens, first_output, outputs, results);
    case WeightKind::kNibbles:
      return multiply_kind<WeightKind::kNibbles>(weight, packed, tokens, first_output, outputs, results);
    default: return avx512_kernels().products.product(weight, packed, tokens, first_output, outputs, results);
  }
}

}  // namespace
}  // namespace jaxkv
