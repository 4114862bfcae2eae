// The product in bfloat16 on vectors of pairs: x and the weights' values rounded to it, their products summed in float32.
//
// As in float32, a panel of rows at a time, and dot by dot; a vector has twice as many numbers. Rows of bfloat16 are read as
// they lie.
#pragma once

#include <type_traits>

#include "pair_simd.h"
#include "tile.h"
#include "weight_rows.h"

namespace jaxkv {
namespace {

constexpr int64_t kPairedRows = kUnpackedGroups * kRowGroup;

// x is packed in panels along `in`: [panels][tokens][panel / 2 + kStridePadding] of pairs, zeros where a panel is longer
// than what is left.
int64_t pair_stride(const WeightView& weight) { return panel_length(weight.in_features) / 2 + kStridePadding; }

int64_t pair_packed_size(const WeightView& weight, int64_t tokens) {
  return panel_count(weight.in_features) * tokens * pair_stride(weight);
}

void pair_pack(const WeightView& weight, const TokenRows& x, int64_t tokens, Part part, float* packed) {
  const int64_t in = weight.in_features, panel = panel_length(in), stride = pair_stride(weight);
  for (int64_t token = part.begin(tokens); token < part.end(tokens); ++token) {
    const float* from = x(token, 1);
    float* to = packed + token * stride;
    for (int64_t first = 0; first < in; first += panel, to += tokens * stride)
      for (int64_t i = 0; i < panel; i += kPairStep)
        _mm512_storeu_si512(to + i / 2, narrow_some(from + first + i, in - first - i, 16));
  }
}

// A row of a panel, rounded; zeros up to the next vector's end.
template <class Rows>
inline void pair_row(const Rows& rows, int64_t row, int64_t count, float* wide, float* to) {
  unpack_panel_row<Avx512Simd>(rows, row, wide);
  for (int64_t i = 0; i < count; i += kPairStep)
    _mm512_storeu_si512(to + i / 2, narrow_some(wide + i, count - i, 16));
}

template <class Rows>
void pair_product_of(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                     float* results) {
  alignas(64) float wide[kMaxPanel], narrow[kPairedRows][kMaxPanel / 2];
  const float* w[kPairedRows];
  const int64_t in = weight.in_features, panel = panel_length(in), stride = pair_stride(weight);
  for (int64_t first = 0; first < in; first += panel, packed += tokens * stride) {
    const int64_t count = in - first < panel ? in - first : panel, padded = (count + kPairStep - 1) / kPairStep * kPairStep;
    for (int64_t output = 0; output < outputs; output += kPairedRows) {
      int64_t groups = 0;
      RowsAfter after;
      after.bytes = 2 * Rows::kElementBytes;
      for (int64_t row = output; row < outputs && groups < kUnpackedGroups; row += kRowGroup, ++groups) {
        const Rows rows(weight, first_output + row, first, count);
        for (int64_t n = 0; n < kRowGroup; ++n) {
          const bool as_it_lies = std::is_same_v<Rows, DenseRows<Avx512Simd, Element::kBF16>> && count == padded;
          after.set(groups * kRowGroup + n, kPairedRows, weight, first_output + row + n, rows.stored(n), Rows::kElementBytes);
          w[groups * kRowGroup + n] = as_it_lies ? static_cast<const float*>(rows.stored(n)) : narrow[groups * kRowGroup + n];
          if (as_it_lies) continue;
          pair_row(rows, n, count, wide, narrow[groups * kRowGroup + n]);
        }
      }
      tiles<PairSimd>(packed, tokens, stride, w, groups, padded / 2, results + output, kOutputBlock, first > 0, after);
    }
  }
}

void pair_product(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                  float* results) {
  with_rows<Avx512Simd>(weight.kind, [&](auto* type) {
    pair_product_of<std::remove_pointer_t<decltype(type)>>(weight, packed, tokens, first_output, outputs, results);
  });
}

}  // namespace
}  // namespace jaxkv
