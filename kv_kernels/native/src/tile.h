// The register tile that every product of rows with rows is made of: M rows of x with four rows of w, dot by dot.
//
// A dot product is one vector accumulator over k in order, summed across at the end by one tree: the same for every M.
#pragma once

#include "kernels.h"

namespace jaxkv {
namespace {

// Rows that are read next may be given: what lies there where w is read is asked for, a few lines at a time, since all at once
// they would keep the processor waiting as long as reading them.
template <class S, int M>
static inline void tile(const float* x, int64_t x_stride, const float* const* w, int64_t count, float* out,
                        int64_t out_stride, bool add, const char* const* ahead, int64_t rows_ahead, int64_t ahead_bytes) {
  using V = typename S::V;
  V sums[M][kRowGroup];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kRowGroup; ++n) sums[m][n] = S::zero();
  const float *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
  for (int64_t k = 0; k < count; k += S::kWidth) {
    for (int64_t i = 0; i < rows_ahead; ++i) __builtin_prefetch(ahead[i] + k * ahead_bytes, 0, 3);
    const V a = S::load(w0 + k), b = S::load(w1 + k), c = S::load(w2 + k), d = S::load(w3 + k);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const V value = S::load(x + m * x_stride + k);
      sums[m][0] = S::fma(a, value, sums[m][0]);
      sums[m][1] = S::fma(b, value, sums[m][1]);
      sums[m][2] = S::fma(c, value, sums[m][2]);
      sums[m][3] = S::fma(d, value, sums[m][3]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    if (add) {
      S::add_sums(out + m * out_stride, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    } else {
      S::store_sums(out + m * out_stride, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    }
  }
}

// For every row of w of a call, where a row of the weight lies that comes after all of them; the weight's last rows are their
// own. `bytes` are those of a float of w.
struct RowsAfter {
  const char* rows[kUnpackedGroups * kRowGroup];
  int64_t bytes = 0;  // none are given

  // `row` of the weight, `stored` in so many bytes an element, is row `index` of `all`.
  void set(int64_t index, int64_t all, const WeightView& weight, int64_t row, const void* stored, int64_t element_bytes) {
    const int64_t distance = row + all < weight.out_features ? all * weight.in_features * element_bytes : 0;
    rows[index] = static_cast<const char*>(stored) + distance;
  }
};

// `rows` rows of x times `groups` groups of four rows of w; `count` is a multiple of the vector's width. Group g goes to
// columns 4g to 4g + 3 of out. A few rows of x stay in the first-level cache while all of w passes. Those that come
// `after` are asked for meanwhile.
template <class S>
static inline void tiles(const float* x, int64_t rows, int64_t x_stride, const float* const* w, int64_t groups,
                         int64_t count, float* out, int64_t out_stride, bool add, const RowsAfter& after) {
  // Tiles of about equal height: a last one of a single row would wait for its sums most of the time.
  const int64_t parts = (rows + S::kTileRows - 1) / S::kTileRows;
  for (int64_t part = 0, row = 0; part < parts; ++part) {
    const int64_t height = (rows - row + parts - part - 1) / (parts - part);
    const float* from = x + row * x_stride;
    // Each part asks for its share of every group's rows.
    const int64_t first_ahead = part * kRowGroup / parts;
    const int64_t asked = after.bytes == 0 ? 0 : (part + 1) * kRowGroup / parts - first_ahead;
    for (int64_t group = 0; group < groups; ++group) {
      const float* const* four = w + group * kRowGroup;
      float* to = out + row * out_stride + group * kRowGroup;
      const char* const* next = after.rows + group * kRowGroup + first_ahead;
      switch (height) {
        case 1: tile<S, 1>(from, x_stride, four, count, to, out_stride, add, next, asked, after.bytes); break;
        case 2: tile<S, 2>(from, x_stride, four, count, to, out_stride, add, next, asked, after.bytes); break;
        case 3: if constexpr (S::kTileRows >= 3) tile<S, 3>(from, x_stride, four, count, to, out_stride, add, next, asked, after.bytes); break;
        case 4: if constexpr (S::kTileRows >= 4) tile<S, 4>(from, x_stride, four, count, to, out_stride, add, next, asked, after.bytes); break;
        case 5: if constexpr (S::kTileRows >= 5) tile<S, 5>(from, x_stride, four, count, to, out_stride, add, next, asked, after.bytes); break;
        case 6: if constexpr (S::kTileRows >= 6) tile<S, 6>(from, x_stride, four, count, to, out_stride, add, next, asked, after.bytes); break;
      }
    }
    row += height;
  }
}

}  // namespace
}  // namespace jaxkv
