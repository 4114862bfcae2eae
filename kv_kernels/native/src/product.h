// The weight product of one instruction set.
//
// Few tokens: four rows are read side by side and unpacked in registers, so that memory sets the pace. Many: a panel of
// four rows is unpacked once into the first-level cache and multiplied with all tokens of the block. Both add the same
// products in the same order.
#pragma once

#include <type_traits>

#include "tile.h"
#include "weight_rows.h"

namespace jaxkv {
namespace {

template <class S, class Rows, int M>
static inline void direct(const Rows& rows, const float* x, int64_t x_stride, float* out, int64_t out_stride, bool add) {
  using V = typename S::V;
  constexpr int64_t kVectors = Rows::kStep / S::kWidth;
  V sums[M][kRowGroup];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kRowGroup; ++n) sums[m][n] = S::zero();
  int64_t k = 0;
  for (; k < rows.whole(); k += Rows::kStep) {
#pragma GCC unroll 4
    for (int n = 0; n < kRowGroup; ++n) {
      V values[kVectors];
      // One token reads rows as fast as they come, which the processor foresees.
      if constexpr (Rows::kElementBytes > 0 && M > 1)
        __builtin_prefetch(static_cast<const char*>(rows.stored(n)) + rows.after() + k * Rows::kElementBytes, 0, 3);
      rows.read(n, k, values);
#pragma GCC unroll 8
      for (int64_t j = 0; j < kVectors; ++j)
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
          sums[m][n] = S::fma(values[j], S::load(x + m * x_stride + k + j * S::kWidth), sums[m][n]);
    }
  }
  if (rows.has_tail()) {
#pragma GCC unroll 4
    for (int n = 0; n < kRowGroup; ++n) {
      V values[kVectors];
      rows.read_tail(n, k, values);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[m][n] = S::fma(values[0], S::load(x + m * x_stride + k), sums[m][n]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    if (add) {
      S::add_sums(out + m * out_stride, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    } else {
      S::store_sums(out + m * out_stride, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    }
  }
}

// Outputs [first_output, last_output) of one panel by way of a buffer, kUnpackedGroups groups of rows at a time.
template <class S, class Rows>
static inline void by_buffer(const WeightView& weight, int64_t first_output, int64_t last_output, int64_t first,
                             int64_t count, const float* x, int64_t tokens, int64_t x_stride, float* out, bool add) {
  constexpr int64_t kUnpackedRows = kUnpackedGroups * kRowGroup;
  alignas(64) float unpacked[kUnpackedRows][kMaxPanel];
  const float* w[kUnpackedRows];
  const int64_t padded = (count + S::kWidth - 1) / S::kWidth * S::kWidth;
  for (int64_t output = first_output; output < last_output; output += kUnpackedRows) {
    int64_t groups = 0;
    RowsAfter after;
    after.bytes = Rows::kElementBytes;
    for (int64_t row = output; row < last_output && groups < kUnpackedGroups; row += kRowGroup, ++groups) {
      const Rows rows(weight, row, first, count);
      for (int64_t n = 0; n < kRowGroup; ++n) {
        float* buffer = unpacked[groups * kRowGroup + n];
        after.set(groups * kRowGroup + n, kUnpackedRows, weight, row + n, rows.stored(n), Rows::kElementBytes);
        if (Rows::kFloat && !rows.has_tail()) {
          w[groups * kRowGroup + n] = static_cast<const float*>(rows.stored(n));
        } else {
          unpack_panel_row<S>(rows, n, buffer);
          w[groups * kRowGroup + n] = buffer;
        }
      }
    }
    tiles<S>(x, tokens, x_stride, w, groups, padded, out + (output - first_output), kOutputBlock, add, after);
  }
}

template <class S, class Rows, int M>
static inline void direct_block(const WeightView& weight, int64_t first_output, int64_t last_output, int64_t first,
                                int64_t count, const float* x, int64_t x_stride, float* out, bool add) {
  for (int64_t output = first_output; output < last_output; output += kRowGroup) {
    const Rows rows(weight, output, first, count);
    direct<S, Rows, M>(rows, x, x_stride, out + (output - first_output), kOutputBlock, add);
  }
}

// x is packed in panels along `in`: [panels][tokens][panel + kStridePadding], zeros where a panel is longer than what is
// left.
template <class S>
static int64_t packed_size(const WeightView& weight, int64_t tokens) {
  return panel_count(weight.in_features) * tokens * (panel_length(weight.in_features) + kStridePadding);
}

template <class S>
static void pack(const WeightView& weight, const TokenRows& x, int64_t tokens, Part part, float* packed) {
  const int64_t in = weight.in_features, panel = panel_length(in), stride = panel + kStridePadding;
  for (int64_t token = part.begin(tokens); token < part.end(tokens); ++token) {
    const float* from = x(token, 1);
    float* to = packed + token * stride;
    for (int64_t first = 0; first < in; first += panel, from += panel, to += tokens * stride) {
      const int64_t count = in - first < panel ? in - first : panel;
      for (int64_t i = 0; i < count; ++i) to[i] = from[i];
      for (int64_t i = count; i < panel; ++i) to[i] = 0;
    }
  }
}

template <class S, class Rows>
static void product_of(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output,
                       int64_t last_output, float* results) {
  const int64_t in = weight.in_features, panel = panel_length(in), x_stride = panel + kStridePadding;
  for (int64_t first = 0; first < in; first += panel) {
    const int64_t count = in - first < panel ? in - first : panel;
    const float* x = packed + first / panel * tokens * x_stride;
    const bool add = first > 0;
    const auto run = [&](auto rows_of_x) {
      direct_block<S, Rows, decltype(rows_of_x)::value>(weight, first_output, last_output, first, count, x, x_stride,
                                                        results, add);
    };
    if (tokens == 1) {
      run(std::integral_constant<int, 1>());
    } else if (tokens == 2) {
      run(std::integral_constant<int, 2>());
    } else if (S::kDirectTokens >= 3 && tokens == 3) {
      run(std::integral_constant<int, S::kDirectTokens >= 3 ? 3 : 1>());
    } else if (S::kDirectTokens >= 4 && tokens == 4) {
      run(std::integral_constant<int, S::kDirectTokens >= 4 ? 4 : 1>());
    } else {
      by_buffer<S, Rows>(weight, first_output, last_output, first, count, x, tokens, x_stride, results, add);
    }
  }
}

template <class S>
static void product(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output,
                    int64_t outputs, float* results) {
  with_rows<S>(weight.kind, [&](auto* type) {
    product_of<S, std::remove_pointer_t<decltype(type)>>(weight, packed, tokens, first_output, first_output + outputs,
                                                         results);
  });
}

}  // namespace
}  // namespace jaxkv
