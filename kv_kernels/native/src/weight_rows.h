// Four rows of a weight over one panel, unpacked to float32 vector by vector.
//
// A reader gives `kStep` values of a row at offset k of the panel. What it gives is the weight's value rounded once, so
// it does not matter whether a product unpacks in registers or by way of a buffer.
#pragma once

#include "convert.h"

namespace jaxkv {
namespace {

constexpr int64_t kPanelBlocks = kMaxPanel / kQuantBlock;

template <class S, Element E>
class DenseRows {
 public:
  static constexpr int64_t kStep = S::kWidth;
  static constexpr bool kFloat = E == Element::kF32;
  static constexpr int64_t kElementBytes = kFloat ? 4 : 2;

  // Rows past the last one repeat it; their results are not stored.
  DenseRows(const WeightView& weight, int64_t row, int64_t first, int64_t count) : count_(count) {
    after_ = row + 2 * kRowGroup <= weight.out_features ? kRowGroup * weight.in_features * element_size(E) : 0;
    for (int64_t i = 0; i < kRowGroup; ++i) {
      const int64_t actual = row + i < weight.out_features ? row + i : weight.out_features - 1;
      rows_[i] = static_cast<const char*>(weight.values) + (actual * weight.in_features + first) * element_size(E);
    }
  }
  // The panel's length up to its last whole step; what follows is read by `read_tail`.
  int64_t whole() const { return count_ / kStep * kStep; }
  bool has_tail() const { return count_ % kStep != 0; }
  void read(int64_t row, int64_t k, typename S::V* out) const { out[0] = load_as_float<S, E>(rows_[row], k); }
  void read_tail(int64_t row, int64_t k, typename S::V* out) const {
    out[0] = load_tail_as_float<S, E>(rows_[row], k, count_ - k);
  }
  const void* stored(int64_t row) const { return rows_[row]; }
  int64_t after() const { return after_; }

 private:
  const char* rows_[kRowGroup];
  int64_t count_, after_;
};

template <class S, WeightKind kKind>
class QuantRows {
 public:
  static constexpr int64_t kStep = kQuantBlock;
  static constexpr bool kFloat = false;
  static constexpr int64_t kElementBytes = 0;  // of no whole number
  static constexpr int64_t kBlockBytes = kKind == WeightKind::kQ8_0 ? 32 : 16;
  static constexpr int64_t kBlockStride = in_tiles(kKind) ? WeightTile::kBlockBytes : kBlockBytes;

  QuantRows(const WeightView& weight, int64_t row, int64_t first, int64_t count) : count_(count) {
    const int64_t row_blocks = weight.in_features / kQuantBlock, first_block = first / kQuantBlock;
    const int64_t blocks = count / kQuantBlock;
    for (int64_t i = 0; i < kRowGroup; ++i) {
      const int64_t actual = row + i < weight.out_features ? row + i : weight.out_features - 1;
      const auto* values = static_cast<const uint8_t*>(weight.values);
      if constexpr (in_tiles(kKind)) {
        const int64_t tile_row = actual % WeightTile::kRows;
        const int64_t block = (actual - tile_row) * row_blocks + first_block * WeightTile::kRows;
        rows_[i] = values + block * kBlockBytes + WeightTile::offset(tile_row);
        widen_tile_row(weight.scales + block + tile_row, blocks, scales_[i]);
        if constexpr (row_kind(kKind) == WeightKind::kQ4_1) {
          widen_tile_row(weight.mins + block + tile_row, blocks, mins_[i]);
        }
      } else {
        const int64_t block = actual * row_blocks + first_block;
        rows_[i] = values + block * kBlockBytes;
        widen_exactly<S, Element::kF16>(weight.scales + block, blocks, scales_[i]);
        if constexpr (kKind == WeightKind::kQ4_1) {
          widen_exactly<S, Element::kF16>(weight.mins + block, blocks, mins_[i]);
        }
      }
    }
  }
  int64_t whole() const { return count_; }
  bool has_tail() const { return false; }
  void read(int64_t row, int64_t k, typename S::V* out) const {
    const int64_t block = k / kQuantBlock;
    const uint8_t* quants = rows_[row] + block * kBlockStride;
    const float scale = scales_[row][block];
    if constexpr (kKind == WeightKind::kQ8_0) S::unpack_bytes(reinterpret_cast<const int8_t*>(quants), scale, out);
    // Scale times quant is exact in float32, so q*d - 8*d is (q - 8)*d rounded once.
    if constexpr (row_kind(kKind) == WeightKind::kQ4_0) S::unpack_nibbles(quants, scale, -8 * scale, out);
    if constexpr (row_kind(kKind) == WeightKind::kQ4_1) S::unpack_nibbles(quants, scale, mins_[row][block], out);
  }
  void read_tail(int64_t, int64_t, typename S::V*) const {}
  const void* stored(int64_t) const { return nullptr; }

 private:
  static void widen_tile_row(const uint16_t* from, int64_t blocks, float* to) {
    uint16_t row[kPanelBlocks];
    for (int64_t i = 0; i < blocks; ++i) row[i] = from[i * WeightTile::kRows];
    widen_exactly<S, Element::kF16>(row, blocks, to);
  }

  const uint8_t* rows_[kRowGroup];
  alignas(64) float scales_[kRowGroup][kPanelBlocks];
  alignas(64) float mins_[kRowGroup][kPanelBlocks];
  int64_t count_;
};

// Numbers of `count` blocks from `first` on, or half blocks where kPerBlock is 2, for four rows: out [row][unit].
template <class S, int kPerBlock>
static inline void read_group_numbers(const GroupNumbers& from, const int64_t* rows, int64_t row_blocks, int64_t first,
                                      int64_t blocks, float (*out)[kPanelBlocks * kPerBlock]) {
  const int64_t row_groups = row_blocks / from.group_blocks, first_group = first / from.group_blocks;
  const int64_t groups = (first + blocks - 1) / from.group_blocks + 1 - first_group;
  const int64_t group_units = from.group_blocks * kPerBlock, units = blocks * kPerBlock;
  const int64_t skipped = (first - first_group * from.group_blocks) * kPerBlock;
  for (int64_t i = 0; i < kRowGroup; ++i) {
    float numbers[kPanelBlocks + 1];
    const int64_t at = rows[i] * row_groups + first_group;
    if (from.type == Element::kF32) {
      for (int64_t j = 0; j < groups; ++j) numbers[j] = static_cast<const float*>(from.numbers)[at + j];
    } else {
      widen_exactly<S, Element::kF16>(static_cast<const uint16_t*>(from.numbers) + at, groups, numbers);
    }
    if (from.factors != nullptr) {
      const int8_t* factors = from.factors + (rows[i] * row_blocks + first) * kPerBlock;
      for (int64_t j = 0; j < units; ++j) out[i][j] = factors[j];
    } else {
      for (int64_t j = 0; j < units; ++j) out[i][j] = 1;
    }
    for (int64_t j = 0, end = group_units - skipped, group = 0; j < units; end += group_units, ++group)
      for (; j < (end < units ? end : units); ++j) out[i][j] *= numbers[group];
  }
}

template <class S, WeightKind kKind>
class GroupedRows {
 public:
  static constexpr int64_t kStep = kQuantBlock;
  static constexpr bool kFloat = false;
  static constexpr int64_t kElementBytes = 0;  // of no whole number
  static constexpr bool kHasMins = kKind != WeightKind::kBytes && kKind != WeightKind::kFloat8;
  static constexpr int kHighBits = kKind == WeightKind::kFiveBits ? 1 : kKind == WeightKind::kSixBits ? 2 : 0;
  static constexpr int kPerBlock = kKind == WeightKind::kSixBits ? 2 : 1;  // scales of a block
  static constexpr int64_t kBlockBytes = kHasMins ? 16 : 32;

  GroupedRows(const WeightView& weight, int64_t row, int64_t first, int64_t count) : count_(count) {
    const int64_t row_blocks = weight.in_features / kQuantBlock, first_block = first / kQuantBlock;
    int64_t rows[kRowGroup];
    for (int64_t i = 0; i < kRowGroup; ++i) {
      rows[i] = row + i < weight.out_features ? row + i : weight.out_features - 1;
      const int64_t block = rows[i] * row_blocks + first_block;
      rows_[i] = static_cast<const uint8_t*>(weight.values) + block * kBlockBytes;
      if constexpr (kHighBits > 0) high_bits_[i] = weight.high_bits + block * 4 * kHighBits;
    }
    const int64_t blocks = count / kQuantBlock;
    read_group_numbers<S, kPerBlock>(weight.group_scales, rows, row_blocks, first_block, blocks, scales_);
    if constexpr (kHasMins) {
      if (weight.group_mins.numbers != nullptr) {
        read_group_numbers<S, kPerBlock>(weight.group_mins, rows, row_blocks, first_block, blocks, mins_);
      } else {
        for (int64_t i = 0; i < kRowGroup; ++i)
          for (int64_t j = 0; j < blocks * kPerBlock; ++j) mins_[i][j] = -weight.offset * scales_[i][j];
      }
    }
  }
  int64_t whole() const { return count_; }
  bool has_tail() const { return false; }
  // A float16 scale times a quant, or times a factor and a quant, is exact in float32: values are rounded once.
  void read(int64_t row, int64_t k, typename S::V* out) const {
    const int64_t block = k / kQuantBlock;
    const uint8_t* quants = rows_[row] + block * kBlockBytes;
    const float* scales = scales_[row] + block * kPerBlock;
    if constexpr (kKind == WeightKind::kBytes) S::unpack_bytes(reinterpret_cast<const int8_t*>(quants), *scales, out);
    if constexpr (kKind == WeightKind::kFloat8) S::unpack_float8(quants, *scales, out);
    if constexpr (kKind == WeightKind::kNibbles) S::unpack_nibbles(quants, *scales, mins_[row][block], out);
    if constexpr (kHighBits > 0) {
      S::template unpack_bits<kHighBits, kPerBlock>(quants, high_bits_[row] + block * 4 * kHighBits, scales,
                                                    mins_[row] + block * kPerBlock, out);
    }
  }
  void read_tail(int64_t, int64_t, typename S::V*) const {}
  const void* stored(int64_t) const { return nullptr; }

 private:
  const uint8_t* rows_[kRowGroup];
  const uint8_t* high_bits_[kRowGroup];
  alignas(64) float scales_[kRowGroup][kPanelBlocks * kPerBlock];
  alignas(64) float mins_[kRowGroup][kPanelBlocks * kPerBlock];
  int64_t count_;
};

// Calls `use` with the reader type of a weight's kind.
template <class S, class F>
static inline void with_rows(WeightKind kind, F&& use) {
  switch (kind) {
    case WeightKind::kF32: return use(static_cast<DenseRows<S, Element::kF32>*>(nullptr));
    case WeightKind::kF16: return use(static_cast<DenseRows<S, Element::kF16>*>(nullptr));
    case WeightKind::kBF16: return use(static_cast<DenseRows<S, Element::kBF16>*>(nullptr));
    case WeightKind::kQ8_0: return use(static_cast<QuantRows<S, WeightKind::kQ8_0>*>(nullptr));
    case WeightKind::kQ4_0: return use(static_cast<QuantRows<S, WeightKind::kQ4_0>*>(nullptr));
    case WeightKind::kQ4_1: return use(static_cast<QuantRows<S, WeightKind::kQ4_1>*>(nullptr));
    case WeightKind::kQ4_0Tiles: return use(static_cast<QuantRows<S, WeightKind::kQ4_0Tiles>*>(nullptr));
    case WeightKind::kQ4_1Tiles: return use(static_cast<QuantRows<S, WeightKind::kQ4_1Tiles>*>(nullptr));
    case WeightKind::kBytes: return use(static_cast<GroupedRows<S, WeightKind::kBytes>*>(nullptr));
    case WeightKind::kNibbles: return use(static_cast<GroupedRows<S, WeightKind::kNibbles>*>(nullptr));
    case WeightKind::kFiveBits: return use(static_cast<GroupedRows<S, WeightKind::kFiveBits>*>(nullptr));
    case WeightKind::kSixBits: return use(static_cast<GroupedRows<S, WeightKind::kSixBits>*>(nullptr));
    case WeightKind::kFloat8: return use(static_cast<GroupedRows<S, WeightKind::kFloat8>*>(nullptr));
  }
}

// The `count` values of one row from `first` on, zeros up to the next vector's end.
template <class S, class Rows>
static inline void unpack_panel_row(const Rows& rows, int64_t row, float* out) {
  constexpr int64_t kVectors = Rows::kStep / S::kWidth;
  typename S::V values[kVectors];
  int64_t k = 0;
  for (; k < rows.whole(); k += Rows::kStep) {
    rows.read(row, k, values);
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) S::store(out + k + j * S::kWidth, values[j]);
  }
  if (rows.has_tail()) {
    rows.read_tail(row, k, values);
    S::store(out + k, values[0]);
  }
}

template <class S>
static void unpack_row(const WeightView& weight, int64_t row, float* out) {
  with_rows<S>(weight.kind, [&](auto* type) {
    using Rows = std::remove_pointer_t<decltype(type)>;
    alignas(64) float panel[kMaxPanel];
    for (int64_t first = 0; first < weight.in_features; first += kMaxPanel) {
      const int64_t left = weight.in_features - first, count = left < kMaxPanel ? left : kMaxPanel;
      unpack_panel_row<S>(Rows(weight, row, first, count), 0, panel);
      for (int64_t i = 0; i < count; ++i) out[first + i] = panel[i];
    }
  });
}

}  // namespace
}  // namespace jaxkv
