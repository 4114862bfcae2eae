// Sixteen rows of a quantized weight, unpacked some blocks at a time.
#pragma once

#include "amx_pack.h"

namespace jaxkv {
namespace {

// Sixteen outputs of some blocks.
struct Unpacked {
  alignas(64) char tiles[kScaleRun][kTileBytes];
  alignas(64) float scales[kScaleRun][kTileOutputs];
  alignas(64) float mins[kScaleRun][kTileOutputs];
};

constexpr bool has_mins(WeightKind kind) { return kind == WeightKind::kQ4_1 || kind == WeightKind::kNibbles; }

// Sixteen rows of a weight; those past the last one repeat it, and their results are of no use.
template <WeightKind kKind>
class TileRows {
 public:
  TileRows() = default;
  TileRows(const WeightView& weight, int64_t output) : weight_(&weight), blocks_(weight.in_features / kQuantBlock) {
    for (int64_t i = 0; i < kTileOutputs; ++i) {
      rows_[i] = output + i < weight.out_features ? output + i : weight.out_features - 1;
      values_[i] = static_cast<const uint8_t*>(weight.values) + rows_[i] * blocks_ * block_bytes(kKind);
      if constexpr (kKind != WeightKind::kNibbles) scales_[i] = weight.scales + rows_[i] * blocks_;
      if constexpr (kKind == WeightKind::kQ4_1) mins_[i] = weight.mins + rows_[i] * blocks_;
    }
  }
  const uint8_t* const* values() const { return values_; }
  void unpack_scales(int64_t first, int64_t blocks, Unpacked* to) const {
    if constexpr (kKind == WeightKind::kNibbles) {
      unpack_group_numbers(weight_->group_scales, rows_, blocks_, first, blocks, to->scales[0]);
      if (weight_->group_mins.numbers != nullptr) {
        unpack_group_numbers(weight_->group_mins, rows_, blocks_, first, blocks, to->mins[0]);
      } else {
        const __m512 offset = _mm512_set1_ps(-weight_->offset);
        for (int64_t i = 0; i < blocks; ++i)
          _mm512_store_ps(to->mins[i], _mm512_mul_ps(offset, _mm512_load_ps(to->scales[i])));
      }
    } else {
      jaxkv::unpack_scales(scales_, blocks_, first, blocks, to->scales[0]);
      if constexpr (has_mins(kKind)) jaxkv::unpack_scales(mins_, blocks_, first, blocks, to->mins[0]);
    }
  }
  // Those of at most sixteen blocks, [row][16].
  void read_scales(int64_t first, int64_t blocks, float (*scales)[16], float (*mins)[16]) const {
    if constexpr (kKind == WeightKind::kNibbles) {
      read_group_scales(first, blocks, scales, mins);
    } else {
      const __mmask16 present = static_cast<__mmask16>((1 << blocks) - 1);
      const auto read = [&](const uint16_t* const* rows, float (*to)[16]) {
        for (int64_t i = 0; i < kTileOutputs; ++i)
          _mm512_store_ps(to[i], _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, rows[i] + first)));
      };
      read(scales_, scales);
      if constexpr (has_mins(kKind)) read(mins_, mins);
    }
  }
  // Asks for what a block is in rows that come `tiles` times sixteen after these; which of them is which does not matter.
  void prefetch_ahead(int64_t block, int64_t tiles) const {
    const int64_t at = kTileOutputs * (tiles * blocks_ + block);
    const uint8_t* next = values_[0] + at * block_bytes(kKind);
    for (int64_t i = 0; i < kTileOutputs * block_bytes(kKind); i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
    if constexpr (kKind == WeightKind::kNibbles) return;
    _mm_prefetch(scales_[0] + at, _MM_HINT_T0);
    if constexpr (kKind == WeightKind::kQ4_1) _mm_prefetch(mins_[0] + at, _MM_HINT_T0);
  }

 private:
  void read_group_scales(int64_t first, int64_t blocks, float (*scales)[16], float (*mins)[16]) const {
    Unpacked by_block;
    for (int64_t run = 0; run < blocks; run += kScaleRun) {
      const int64_t count = blocks - run < kScaleRun ? blocks - run : kScaleRun;
      unpack_scales(first + run, count, &by_block);
      for (int64_t i = 0; i < kTileOutputs; ++i) {
        for (int64_t block = 0; block < count; ++block) {
          scales[i][run + block] = by_block.scales[block][i];
          mins[i][run + block] = by_block.mins[block][i];
        }
      }
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
