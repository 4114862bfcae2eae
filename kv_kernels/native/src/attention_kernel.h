// Ragged paged attention of one instruction set: one tile of query tokens, all query heads of one K/V head.
//
// Keys are taken in blocks of kKeyBlock counted from position 0, each widened to float32 once and used by every query
// row of the tile (group heads times tokens). Scores are dot products over head_dim in one order, a block's weights are
// summed in one order, and a key that a row may not see has weight exactly 0: so a row's bits do not depend on the
// other rows of its tile.
#pragma once

#include <cstdint>

#include "convert.h"
#include "elementwise.h"
#include "tile.h"

namespace jaxkv {

static constexpr float kMinusInfinity = -__builtin_inff();

// acc[rows][dim] = acc * shrink + weights[rows][keys] times values[keys][dim], for R rows and C vectors of dim.
template <class S, int R, int C>
static inline void add_values(float* acc, int64_t stride, const float* shrink, const float* weights,
                              const float* values, int64_t keys) {
  using V = typename S::V;
  V sums[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      sums[r][c] = S::mul(S::load(acc + r * stride + c * S::kWidth), S::broadcast(shrink[r]));
  for (int64_t key = 0; key < keys; ++key) {
    V value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) value[c] = S::load(values + key * stride + c * S::kWidth);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const V weight = S::broadcast(weights[r * kKeyBlock + key]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = S::fma(weight, value[c], sums[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) S::store(acc + r * stride + c * S::kWidth, sums[r][c]);
}

template <class S, int R>
static inline void add_values_of_rows(float* acc, int64_t stride, const float* shrink, const float* weights,
                                      const float* values, int64_t keys) {
  int64_t d = 0;
  for (; d + 4 * S::kWidth <= stride; d += 4 * S::kWidth)
    add_values<S, R, 4>(acc + d, stride, shrink, weights, values + d, keys);
  for (; d < stride; d += S::kWidth) add_values<S, R, 1>(acc + d, stride, shrink, weights, values + d, keys);
}

template <class S>
struct AttentionScratch {
  int64_t stride;  // head_dim rounded up to the vector's width
  int64_t rows;
  float *keys, *values, *query, *acc, *scores, *best, *total, *shrink;

  AttentionScratch(const Attention& a, int64_t tokens, float* memory)
      : stride((a.head_dim + S::kWidth - 1) / S::kWidth * S::kWidth), rows(tokens * (a.heads / a.kv_heads)) {
    float* next = memory;
    const auto take = [&](int64_t floats) {
      float* part = next;
      next += (floats + 15) / 16 * 16;
      return part;
    };
    keys = take(kKeyBlock * stride);
    values = take(kKeyBlock * stride);
    query = take(rows * stride);
    acc = take(rows * stride);
    scores = take(rows * kKeyBlock);
    best = take(rows);
    total = take(rows);
    shrink = take(rows);
    size = next - memory;
  }
  int64_t size;
};

template <class S>
static int64_t attend_scratch(const Attention& a, int64_t tokens) {
  alignas(64) float none[1];
  return AttentionScratch<S>(a, tokens, none).size;
}

// A block's keys and values to float32, `count` of them and no more: what a page holds after the row's end may be a NaN.
// Keys up to `padded` become zeros; no weight comes of them.
template <class S>
static inline void load_block(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count,
                              int64_t padded, const AttentionScratch<S>& s) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = first + i, entry = position / a.tokens_per_page;
    const int64_t page = tile.pages[entry] + a.first_page;
    const int64_t slot = page * a.tokens_per_page + position % a.tokens_per_page;
    const int64_t index = (slot * a.kv_heads + kv_head) * a.head_dim;
    widen_padded<S>(a.pool_type, a.k, index, a.head_dim, s.keys + i * s.stride);
    widen_padded<S>(a.pool_type, a.v, index, a.head_dim, s.values + i * s.stride);
  }
  for (int64_t i = count * s.stride; i < padded * s.stride; ++i) s.keys[i] = 0;
}

// Scores to weights for one row: keys outside [low, high) get 0. Returns nothing; updates best, total, shrink.
template <class S>
static inline void softmax_row(float* scores, int64_t low, int64_t high, float soft_cap, float* best, float* total,
                               float* shrink) {
  using V = typename S::V;
  if (soft_cap > 0) {
    for (int64_t i = 0; i < kKeyBlock; i += S::kWidth) S::store(scores + i, capped<S>(S::load(scores + i), soft_cap));
  }
  for (int64_t i = 0; i < low; ++i) scores[i] = kMinusInfinity;
  for (int64_t i = high < 0 ? 0 : high; i < kKeyBlock; ++i) scores[i] = kMinusInfinity;
  V highest = S::load(scores);
  for (int64_t i = S::kWidth; i < kKeyBlock; i += S::kWidth) highest = S::max(highest, S::load(scores + i));
  const float block_best = S::highest(highest);
  const float new_best = block_best > *best ? block_best : *best;
  const V offset = S::broadcast(new_best == kMinusInfinity ? 0.0f : new_best);
  V sum = S::zero();
  for (int64_t i = 0; i < kKeyBlock; i += S::kWidth) {
    const V weight = exp_nonpositive<S>(S::sub(S::load(scores + i), offset));
    S::store(scores + i, weight);
    sum = S::add(sum, weight);
  }
  alignas(64) float factor[S::kWidth];
  S::store(factor, exp_nonpositive<S>(S::sub(S::broadcast(*best), offset)));
  *shrink = factor[0];
  *total = *total * factor[0] + S::sum(sum);
  *best = new_best;
}

template <class S>
static void attend(const Attention& a, const QueryTile& tile, int64_t kv_head, float* memory) {
  const AttentionScratch<S> s(a, tile.tokens, memory);
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t row = 0; row < s.rows; ++row) {
    const int64_t token = tile.first_token + row / group, head = kv_head * group + row % group;
    float* query = s.query + row * s.stride;
    widen_padded<S>(a.q_type, a.q, (token * a.heads + head) * a.head_dim, a.head_dim, query);
    if (a.cos != nullptr) rotate<S>(a.cos + token * a.rotated, a.sin + token * a.rotated, a.rotated, query);
    for (int64_t d = 0; d < s.stride; d += S::kWidth) {
      S::store(query + d, S::mul(S::load(query + d), S::broadcast(a.scale)));
      S::store(s.acc + row * s.stride + d, S::zero());
    }
    s.best[row] = kMinusInfinity;
    s.total[row] = 0;
  }
  const int64_t end = tile.position + tile.tokens < tile.kv_len ? tile.position + tile.tokens : tile.kv_len;
  const int64_t oldest = a.window > 0 && tile.position >= a.window ? tile.position - a.window + 1 : 0;
  for (int64_t first = oldest / kKeyBlock * kKeyBlock; first < end; first += kKeyBlock) {
    const int64_t count = end - first < kKeyBlock ? end - first : kKeyBlock;
    const int64_t padded = (count + kRowGroup - 1) / kRowGroup * kRowGroup;
    load_block<S>(a, tile, kv_head, first, count, padded, s);
    const float* w[kKeyBlock];
    for (int64_t i = 0; i < padded; ++i) w[i] = s.keys + i * s.stride;
    tiles<S>(s.query, s.rows, s.stride, w, padded / kRowGroup, s.stride, s.scores, kKeyBlock, false);
    for (int64_t row = 0; row < s.rows; ++row) {
      const int64_t position = tile.position + row / group;
      const int64_t visible = (position + 1 < tile.kv_len ? position + 1 : tile.kv_len) - first;
      const int64_t hidden = a.window > 0 ? position - a.window + 1 - first : 0;
      float* scores = s.scores + row * kKeyBlock;
      softmax_row<S>(scores, hidden < kKeyBlock ? hidden : kKeyBlock, visible < count ? visible : count, a.soft_cap,
                     s.best + row, s.total + row, s.shrink + row);
    }
    int64_t row = 0;
    for (; row + S::kValueRows <= s.rows; row += S::kValueRows)
      add_values_of_rows<S, S::kValueRows>(s.acc + row * s.stride, s.stride, s.shrink + row, s.scores + row * kKeyBlock,
                                           s.values, count);
    for (; row < s.rows; ++row)
      add_values_of_rows<S, 1>(s.acc + row * s.stride, s.stride, s.shrink + row, s.scores + row * kKeyBlock, s.values,
                               count);
  }
  for (int64_t row = 0; row < s.rows; ++row) {
    float* acc = s.acc + row * s.stride;
    const float total = s.total[row] == 0 ? 1.0f : s.total[row];
    for (int64_t d = 0; d < s.stride; d += S::kWidth) S::store(acc + d, S::div(S::load(acc + d), S::broadcast(total)));
    const int64_t token = tile.first_token + row / group, head = kv_head * group + row % group;
    narrow<S>(acc, a.head_dim, a.q_type, a.out, (token * a.heads + head) * a.head_dim);
  }
}

}  // namespace jaxkv
