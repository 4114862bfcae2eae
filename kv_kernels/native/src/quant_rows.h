// Sixteen rows of a quantized weight, unpacked some blocks at a time.
#pragma once

#include "quant_unpack.h"
#include "rows_ahead.h"

namespace jaxkv {
namespace {

// Numbers of sixteen outputs for some blocks.
struct RowScales {
  alignas(64) float scales[kScaleRun][kTileOutputs];
  alignas(64) float mins[kScaleRun][kTileOutputs];
};

constexpr bool has_mins(WeightKind kind) {
  return row_kind(kind) == WeightKind::kQ4_1 || kind == WeightKind::kNibbles;
}

// Sixteen rows of a weight; those past the last one repeat it, and their results are of no use. Weights in tiles have no
// such rows, and `output` is the first of a tile.
template <WeightKind kRowsKind>
class TileRows {
 public:
  static constexpr WeightKind kKind = kRowsKind;
  static constexpr int64_t kBlockStride = in_tiles(kKind) ? WeightTile::kBlockBytes : block_bytes(kKind);

  TileRows() = default;
  TileRows(const WeightView& weight, int64_t output) : weight_(&weight), blocks_(weight.in_features / kQuantBlock) {
    for (int64_t i = 0; i < kTileOutputs; ++i) {
      rows_[i] = output + i < weight.out_features ? output + i : weight.out_features - 1;
      const auto* values = static_cast<const uint8_t*>(weight.values);
      const int64_t first = in_tiles(kKind) ? output * blocks_ : rows_[i] * blocks_;
      values_[i] = values + first * block_bytes(kKind) + (in_tiles(kKind) ? WeightTile::offset(i) : 0);
      if constexpr (kKind != WeightKind::kNibbles) scales_[i] = weight.scales + first;
      if constexpr (row_kind(kKind) == WeightKind::kQ4_1) mins_[i] = weight.mins + first;
    }
  }
  // A row's quants in a block.
  const uint8_t* quants(int64_t row, int64_t block) const { return values_[row] + block * kBlockStride; }
  // Sixteen bytes of a block's quants, the first or the second: number o of out[q] has bytes 4q to 4q + 3 of row o.
  inline __attribute__((always_inline)) void turned_quants(int64_t block, int64_t sixteen, __m512i* out) const {
    __m512i v[4];
    const int64_t at = block * kBlockStride + 16 * sixteen;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if constexpr (in_tiles(kKind)) {
        v[i] = _mm512_loadu_si512(values_[0] + at + 64 * i);
      } else {
        v[i] = _mm512_castsi128_si512(load_16_bytes(values_[i] + at));
        v[i] = _mm512_inserti32x4(v[i], load_16_bytes(values_[4 + i] + at), 1);
        v[i] = _mm512_inserti32x4(v[i], load_16_bytes(values_[8 + i] + at), 2);
        v[i] = _mm512_inserti32x4(v[i], load_16_bytes(values_[12 + i] + at), 3);
      }
    }
    turn(v, out);
  }
  // Scales and mins of blocks [first, first + blocks), at most kScaleRun: [blocks][16 rows].
  void unpack_scales(int64_t first, int64_t blocks, float (*scales)[kTileOutputs], float (*mins)[kTileOutputs]) const {
    if constexpr (kKind == WeightKind::kNibbles) {
      unpack_group_numbers(weight_->group_scales, rows_, blocks_, first, blocks, scales[0]);
      if (weight_->group_mins.numbers != nullptr) {
        unpack_group_numbers(weight_->group_mins, rows_, blocks_, first, blocks, mins[0]);
      } else {
        const __m512 offset = _mm512_set1_ps(-weight_->offset);
        for (int64_t i = 0; i < blocks; ++i)
          _mm512_storeu_ps(mins[i], _mm512_mul_ps(offset, _mm512_loadu_ps(scales[i])));
      }
    } else {
      unpack_numbers(scales_, first, blocks, scales);
      if constexpr (has_mins(kKind)) unpack_numbers(mins_, first, blocks, mins);
    }
  }
  // Asks for what a block is in rows that come `tiles` times sixteen after these; which of them is which does not matter.
  inline __attribute__((always_inline)) void prefetch_ahead(int64_t block, int64_t tiles) const {
    const int64_t at = kTileOutputs * (tiles * blocks_ + block);
    const uint8_t* next = values_[0] + at * block_bytes(kKind);
    for (int64_t i = 0; i < kTileOutputs * block_bytes(kKind); i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
    if constexpr (kKind == WeightKind::kNibbles) return;
    _mm_prefetch(scales_[0] + at, _MM_HINT_T0);
    if constexpr (row_kind(kKind) == WeightKind::kQ4_1) _mm_prefetch(mins_[0] + at, _MM_HINT_T0);
  }

 private:
  void unpack_numbers(const uint16_t* const* rows, int64_t first, int64_t blocks, float (*to)[kTileOutputs]) const {
    if constexpr (in_tiles(kKind)) {
      for (int64_t i = 0; i < blocks; ++i) {
        const void* halves = rows[0] + (first + i) * kTileOutputs;
        _mm512_storeu_ps(to[i], _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(halves))));
      }
    } else {
      turn_scales(rows, blocks_, first, blocks, to[0]);
    }
  }

  const WeightView* weight_;
  int64_t blocks_;
  int64_t rows_[kTileOutputs];
  const uint8_t* values_[kTileOutputs];
  const uint16_t* scales_[kTileOutputs];  // of the kinds that have one for every block
  const uint16_t* mins_[kTileOutputs];
};

}  // namespace
}  // namespace jaxkv
