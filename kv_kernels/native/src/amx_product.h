// The product with quantized weights: exact integers, on tiles of bf16 or on vectors of bytes.
//
// A block's sums of digits times quants are exact, so what tiles and vectors make of them is one number: the digits'
// sums, added from the lowest on. Then acc = sum * scale + acc, acc = sum of x * min + acc, block by block.
#pragma once

#include "amx_pack.h"
#include "digits_product.h"

namespace jaxkv {
namespace {

constexpr int64_t kBlockTiles = kOutputBlock / kTileOutputs;
constexpr int64_t kRunBlocks = 3;  // blocks that pass through the tiles together

// Sixteen outputs of a run of blocks.
struct UnpackedTiles : RowScales {
  alignas(64) char tiles[kRunBlocks][kTileBytes];
};

// Results [height][kOutputBlock] so far, or zeros.
template <int kHeight>
inline void load_results(bool is_first, const float* results, __m512* acc) {
#pragma GCC unroll 16
  for (int t = 0; t < kHeight; ++t) acc[t] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(results + t * kOutputBlock);
}
template <int kHeight>
inline void store_results(const __m512* acc, float* results) {
#pragma GCC unroll 16
  for (int t = 0; t < kHeight; ++t) _mm512_storeu_ps(results + t * kOutputBlock, acc[t]);
}

// What two tiles of tokens make of two tiles of outputs, for a run of blocks; or one of either.
template <int kHeight>
using BlockSums = float[kRunBlocks][2][2][kHeight * kTileOutputs];

// Digits of x times weights, block by block: sums[block][token tile][output tile]. Token tiles are `x_stride` bytes apart.
template <int kHeight, int kTokenTiles, int kOutputTiles>
inline void sum_blocks(const UnpackedTiles* weights, int64_t blocks, const char* x, int64_t x_stride,
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
    for (int digit = 0; digit < kFloatDigits; ++digit, x += kDigitBytes) {
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
inline void add_sums(const UnpackedTiles& weight, bool is_first, int64_t blocks, const BlockSums<kHeight>& sums, int token_tile,
                     int output_tile, const float* x_sums, float* results) {
  __m512 acc[kHeight];
  load_results<kHeight>(is_first, results, acc);
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
  const float* sums(int64_t tile, int64_t block) const {
    return packed + shape.sums_offset() + (tile * shape.blocks + block) * kHeight;
  }
};

template <WeightKind kKind, int kHeight, int kTokenTiles, int kOutputTiles>
inline void multiply_tiles(const UnpackedTiles* weights, int64_t first, int64_t blocks, const PackedTiles<kHeight>& x,
                           int64_t tile, float* results) {
  alignas(64) BlockSums<kHeight> sums;
  sum_blocks<kHeight, kTokenTiles, kOutputTiles>(weights, blocks, x.digits(tile, first),
                                                 x.digits(1, 0) - x.digits(0, 0), sums);
#pragma GCC unroll 2
  for (int token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma GCC unroll 2
    for (int output_tile = 0; output_tile < kOutputTiles; ++output_tile) {
      add_sums<kKind, kHeight>(weights[output_tile], first == 0, blocks, sums, token_tile, output_tile,
                               x.sums(tile + token_tile, first),
                               results + (tile + token_tile) * kHeight * kOutputBlock + output_tile * kTileOutputs);
    }
  }
}

// On tiles, a run of blocks at a time: short enough that its weights, x and sums stay in the first-level cache.
template <WeightKind kKind, int kHeight>
void multiply_by_tiles(const TileRows<kKind>* rows, int64_t output_tiles, const PackedTiles<kHeight>& x, float* results) {
  UnpackedTiles unpacked[kBlockTiles];
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

template <WeightKind kKind>
void multiply_many(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                   float* results) {
  const TokenTiles shape(weight, tokens);
  const TileSize by_token{shape.height, 64}, weights{kTileRows, 64};
  const TileShape tiles({by_token, by_token, by_token, by_token, weights, weights, by_token, by_token});
  TileRows<kKind> rows[kBlockTiles];
  const int64_t output_tiles = (outputs + kTileOutputs - 1) / kTileOutputs;
  for (int64_t i = 0; i < output_tiles; ++i) rows[i] = TileRows<kKind>(weight, first_output + i * kTileOutputs);
  switch (shape.height) {
    case 8: return multiply_by_tiles<kKind, 8>(rows, output_tiles, {shape, packed}, results);
    case 12: return multiply_by_tiles<kKind, 12>(rows, output_tiles, {shape, packed}, results);
    case 16: return multiply_by_tiles<kKind, 16>(rows, output_tiles, {shape, packed}, results);
  }
}

void amx_product(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                 float* results) {
  if (!has_integers(weight.kind))
    return avx512_kernels().products.product(weight, packed, tokens, first_output, outputs, results);
  if (tokens <= kFewTokens)
    return digits_product<kFloatDigits>(weight, packed, tokens, first_output, outputs, results);
  with_integers(weight.kind, [&](auto kind) {
    multiply_many<decltype(kind)::value>(weight, packed, tokens, first_output, outputs, results);
  });
}

}  // namespace
}  // namespace jaxkv
