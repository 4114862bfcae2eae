// Rows of numbers as weights of rows of vectors: scores of queries over keys laid as columns, and values by weights.
#pragma once

#include <cstdint>
#include <type_traits>

namespace jaxkv {
namespace {

// Rows of `weights` times rows of `values`: out[r] = start[r] * out[r] + sum over i < count of weights[r][i] * values[i],
// in that order of i, for R rows and C vectors; without `start` from zero.
template <class S, int R, int C>
static inline void combine_tile(const float* start, const float* weights, int64_t weights_stride, const float* values,
                                int64_t values_stride, int64_t count, float* out, int64_t out_stride) {
  using V = typename S::V;
  V sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      sums[r][c] = start == nullptr ? S::zero()
                                    : S::mul(S::load(out + r * out_stride + c * S::kWidth), S::broadcast(start[r]));
  for (int64_t i = 0; i < count; ++i) {
    V value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) value[c] = S::load(values + i * values_stride + c * S::kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V weight = S::broadcast(weights[r * weights_stride + i]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = S::fma(weight, value[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) S::store(out + r * out_stride + c * S::kWidth, sums[r][c]);
}

template <class S, int R>
static inline void combine_rows(const float* start, const float* weights, int64_t weights_stride, const float* values,
                                int64_t values_stride, int64_t count, float* out, int64_t out_stride, int64_t width) {
  int64_t d = 0;
  for (; d + 4 * S::kWidth <= width; d += 4 * S::kWidth)
    combine_tile<S, R, 4>(start, weights, weights_stride, values + d, values_stride, count, out + d, out_stride);
  for (; d < width; d += S::kWidth)
    combine_tile<S, R, 1>(start, weights, weights_stride, values + d, values_stride, count, out + d, out_stride);
}

// The same for any number of rows; `width` is a multiple of the vector's.
template <class S>
static inline void combine(int64_t rows, const float* start, const float* weights, int64_t weights_stride,
                           const float* values, int64_t values_stride, int64_t count, float* out, int64_t out_stride,
                           int64_t width) {
  constexpr int kMost = S::kValueRows;
  const int64_t parts = (rows + kMost - 1) / kMost;
  for (int64_t part = 0, row = 0; part < parts; ++part) {
    const int64_t height = (rows - row + parts - part - 1) / (parts - part);
    const float* first = start == nullptr ? nullptr : start + row;
    const float* from = weights + row * weights_stride;
    float* to = out + row * out_stride;
    const auto run = [&](auto fixed) {
      combine_rows<S, (decltype(fixed)::value <= kMost ? decltype(fixed)::value : 1)>(
          first, from, weights_stride, values, values_stride, count, to, out_stride, width);
    };
    switch (height) {
      case 1: run(std::integral_constant<int, 1>()); break;
      case 2: run(std::integral_constant<int, 2>()); break;
      case 3: run(std::integral_constant<int, 3>()); break;
      case 4: run(std::integral_constant<int, 4>()); break;
      case 5: run(std::integral_constant<int, 5>()); break;
      default: run(std::integral_constant<int, 6>()); break;
    }
    row += height;
  }
}

}  // namespace
}  // namespace jaxkv
