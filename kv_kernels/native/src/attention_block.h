// Attention's work on a block of keys in float32, whatever the pools hold.
#pragma once

#include <cstdint>

#include "attention_softmax.h"
#include "combine.h"
#include "convert.h"
#include "keys_ahead.h"

namespace jaxkv {
namespace {

template <class S>
struct WideBlock;

// A block's keys and values to float32, `count` of them and no more: what a page holds after the row's end may be a NaN.
// So may the pages before the tile's oldest key, which were given back: zeros stand for their keys and values. Keys lie
// as columns, `padded` of them (a multiple of the vector's width), zeros after the last.
template <class S, Element E>
static inline void load_block(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count,
                              int64_t padded, const WideBlock<S>& s, KeysAhead& ahead) {
  float *key = s.keys, *value = s.values;
  const int64_t oldest = tile.oldest_key(a.window) - first, unseen = oldest < 0 ? 0 : oldest < count ? oldest : count;
  for (const float* end = key + unseen * s.stride; key < end;) *key++ = *value++ = 0;
  for_pages(a, tile, first + unseen, first + count, [&](int64_t slot, int64_t keys) {
    for (int64_t i = slot; i < slot + keys; ++i, key += s.stride, value += s.stride) {
      const int64_t index = (i * a.kv_heads + kv_head) * a.head_dim;
      widen_padded<S, E>(a.k, index, a.head_dim, key);
      widen_padded<S, E>(a.v, index, a.head_dim, value);
      ahead.ask(2);
    }
  });
  for (int64_t i = count * s.stride; i < padded * s.stride; ++i) s.keys[i] = 0;
  for (int64_t key = 0; key < padded; key += S::kWidth)
    for (int64_t d = 0; d < s.stride; d += S::kWidth)
      S::transpose(s.keys + key * s.stride + d, s.stride, s.turned + d * kKeyBlock + key, kKeyBlock);
}

template <class S>
static inline void load_block(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count,
                              int64_t padded, const WideBlock<S>& s, KeysAhead& ahead) {
  switch (a.pool_type) {
    case Element::kF32: return load_block<S, Element::kF32>(a, tile, kv_head, first, count, padded, s, ahead);
    case Element::kF16: return load_block<S, Element::kF16>(a, tile, kv_head, first, count, padded, s, ahead);
    case Element::kBF16: return load_block<S, Element::kBF16>(a, tile, kv_head, first, count, padded, s, ahead);
  }
}

template <class S>
struct WideBlock : SoftmaxScratch<S> {
  using Simd = S;
  using Ahead = KeysAhead;
  float *keys, *turned, *values, *query;

  WideBlock(const Attention& a, int64_t tokens, float* memory) : SoftmaxScratch<S>(a, tokens, memory) {
    keys = this->take(kKeyBlock * this->stride);
    turned = this->take(this->stride * kKeyBlock);
    values = this->take(kKeyBlock * this->stride);
    query = this->take(this->rows * this->stride);
  }

  // Before the first block of a split, and after its last.
  void begin_split(const SoftmaxSums<S>& sums) const { sums.clear(); }
  void finish_split(const SoftmaxSums<S>&) const {}

  // The tile's queries.
  void begin(const Attention& a, const QueryTile& tile, int64_t kv_head) const {
    for (int64_t row = 0; row < this->rows; ++row)
      load_query<S>(a, tile, kv_head, row, this->stride, query + row * this->stride);
  }
  // Scores of all rows with `count` keys from `first` on, and anything up to `padded`; their values are kept.
  void score(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count,
             int64_t padded, KeysAhead& ahead) const {
    load_block<S>(a, tile, kv_head, first, count, padded, *this, ahead);
    combine<S>(this->rows, nullptr, query, this->stride, turned, kKeyBlock, a.head_dim, this->scores, kKeyBlock,
               padded);
  }
  // Scores to weights.
  template <class F>
  void soften(const Attention& a, const SoftmaxSums<S>& sums, int64_t padded, KeysAhead& ahead, F visible_to) const {
    softmax_rows<S>(a, *this, sums, padded, ahead, visible_to, exp_nonpositive<S>);
  }
  // The sums so far, shrunk, and the values of that block by their weights.
  void weigh(const Attention&, int64_t, int64_t count, const SoftmaxSums<S>& sums, KeysAhead&) const {
    combine<S>(this->rows, this->shrink, this->scores, kKeyBlock, values, this->stride, count, sums.acc, this->stride,
               this->stride);
  }
};

}  // namespace
}  // namespace jaxkv
