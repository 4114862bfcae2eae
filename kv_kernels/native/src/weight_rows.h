// Four rows of a weight over one panel, unpacked to float32 vector by vector.
//
// A reader gives `kStep` values of a row at offset k of the panel. What it gives is the weight's value rounded once, so
// it does not matter whether a product unpacks in registers or by way of a buffer.
#pragma once

#include "convert.h"

namespace jaxkv {

constexpr int64_t kPanelBlocks = kMaxPanel / kQuantBlock;

template <class S, Element E>
class DenseRows {
 public:
  static constexpr int64_t kStep = S::kWidth;
  static constexpr bool kFloat = E == Element::kF32;

  // Rows past the last one repeat it; their results are not stored.
  DenseRows(const WeightView& weight, int64_t row, int64_t first, int64_t count) : count_(count) {
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
  const float* floats(int64_t row) const { return reinterpret_cast<const float*>(rows_[row]); }

 private:
  const char* rows_[kRowGroup];
  int64_t count_;
};

template <class S, WeightKind kKind>
class QuantRows {
 public:
  static constexpr int64_t kStep = kQuantBlock;
  static constexpr bool kFloat = false;
  static constexpr int64_t kBlockBytes = kKind == WeightKind::kQ8_0 ? 32 : 16;

  QuantRows(const WeightView& weight, int64_t row, int64_t first, int64_t count) : count_(count) {
    const int64_t row_blocks = weight.in_features / kQuantBlock, first_block = first / kQuantBlock;
    const int64_t blocks = count / kQuantBlock;
    for (int64_t i = 0; i < kRowGroup; ++i) {
      const int64_t actual = row + i < weight.out_features ? row + i : weight.out_features - 1;
      const int64_t block = actual * row_blocks + first_block;
      rows_[i] = static_cast<const uint8_t*>(weight.values) + block * kBlockBytes;
      widen_exactly<S, Element::kF16>(weight.scales + block, blocks, scales_[i]);
      if constexpr (kKind == WeightKind::kQ4_1) {
        widen_exactly<S, Element::kF16>(weight.mins + block, blocks, mins_[i]);
      }
    }
  }
  int64_t whole() const { return count_; }
  bool has_tail() const { return false; }
  void read(int64_t row, int64_t k, typename S::V* out) const {
    const int64_t block = k / kQuantBlock;
    const uint8_t* quants = rows_[row] + block * kBlockBytes;
    const float scale = scales_[row][block];
    if constexpr (kKind == WeightKind::kQ8_0) S::unpack_bytes(reinterpret_cast<const int8_t*>(quants), scale, out);
    // Scale times quant is exact in float32, so q*d - 8*d is (q - 8)*d rounded once.
    if constexpr (kKind == WeightKind::kQ4_0) S::unpack_nibbles(quants, scale, -8 * scale, out);
    if constexpr (kKind == WeightKind::kQ4_1) S::unpack_nibbles(quants, scale, mins_[row][block], out);
  }
  void read_tail(int64_t, int64_t, typename S::V*) const {}
  const float* floats(int64_t) const { return nullptr; }

 private:
  const uint8_t* rows_[kRowGroup];
  alignas(64) float scales_[kRowGroup][kPanelBlocks];
  alignas(64) float mins_[kRowGroup][kPanelBlocks];
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

}  // namespace jaxkv
