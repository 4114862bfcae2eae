// Ragged paged attention of one instruction set: one tile of query tokens, all query heads of one K/V head.
//
// Keys are taken in blocks of kKeyBlock counted from position 0, each widened to float32 once and used by every query
// row of the tile (group heads times tokens). Scores are dot products over head_dim in one order, a block's weights are
// summed in one order, and a key that a row may not see has weight exactly 0: so a row's bits do not depend on the
// other rows of its tile. Sums over kSplitKeys keys, counted from position 0 as well, are taken apart and merged in
// order, always: so it does not matter whether one thread did all of them.
#pragma once

#include <cstdint>

#include "combine.h"
#include "convert.h"
#include "elementwise.h"

namespace jaxkv {

static constexpr float kMinusInfinity = -__builtin_inff();

// The online softmax of some rows (Milakov and Gimelshein, 2018): per row the highest score, the sum of the weights
// relative to it, and the weighted sum of the values [stride].
template <class S>
struct SoftmaxSums {
  int64_t rows, stride;
  float *best, *total, *acc;

  // Room for whole vectors of rows.
  static int64_t size(int64_t rows, int64_t stride) { return 2 * ((rows + 15) / 16 * 16) + rows * stride; }
  SoftmaxSums(int64_t rows_, int64_t stride_, float* memory)
      : rows(rows_), stride(stride_), best(memory), total(best + (rows + 15) / 16 * 16),
        acc(total + (rows + 15) / 16 * 16) {}

  void clear() const {
    for (int64_t row = 0; row < (rows + 15) / 16 * 16; ++row) best[row] = kMinusInfinity, total[row] = 0;
    for (int64_t i = 0; i < rows * stride; ++i) acc[i] = 0;
  }

  // The sums over these keys and those of `more`.
  void merge(const SoftmaxSums& more) const {
    alignas(64) float factors[2][S::kWidth];
    for (int64_t row = 0; row < rows; ++row) {
      const float highest = more.best[row] > best[row] ? more.best[row] : best[row];
      const auto offset = S::broadcast(highest == kMinusInfinity ? 0.0f : highest);
      const auto mine = exp_nonpositive<S>(S::sub(S::broadcast(best[row]), offset));
      const auto theirs = exp_nonpositive<S>(S::sub(S::broadcast(more.best[row]), offset));
      S::store(factors[0], mine);
      S::store(factors[1], theirs);
      best[row] = highest;
      total[row] = total[row] * factors[0][0] + more.total[row] * factors[1][0];
      for (int64_t d = 0; d < stride; d += S::kWidth) {
        float* to = acc + row * stride + d;
        S::store(to, S::fma(S::load(more.acc + row * stride + d), theirs, S::mul(S::load(to), mine)));
      }
    }
  }
};

template <class S>
struct AttentionScratch {
  int64_t stride;  // head_dim rounded up to the vector's width
  int64_t rows;
  float *keys, *turned, *values, *query, *scores, *shrink, *block_best, *all, *split;

  AttentionScratch(const Attention& a, int64_t tokens, float* memory)
      : stride((a.head_dim + S::kWidth - 1) / S::kWidth * S::kWidth), rows(tokens * (a.heads / a.kv_heads)) {
    float* next = memory;
    const auto take = [&](int64_t floats) {
      float* part = next;
      next += (floats + 15) / 16 * 16;
      return part;
    };
    keys = take(kKeyBlock * stride);
    turned = take(stride * kKeyBlock);
    values = take(kKeyBlock * stride);
    query = take(rows * stride);
    scores = take(rows * kKeyBlock);
    shrink = take(rows + S::kWidth);
    block_best = take(rows + S::kWidth);
    all = take(SoftmaxSums<S>::size(rows, stride));
    split = take(SoftmaxSums<S>::size(rows, stride));
    size = next - memory;
  }
  SoftmaxSums<S> sums(float* memory) const { return {rows, stride, memory}; }
  int64_t size;
};

template <class S>
static int64_t attend_scratch(const Attention& a, int64_t tokens) {
  alignas(64) float none[1];
  return AttentionScratch<S>(a, tokens, none).size;
}

// Calls `use(slot, count)` for every page that holds some of the keys [begin, end).
template <class F>
static inline void for_pages(const Attention& a, const QueryTile& tile, int64_t begin, int64_t end, F use) {
  for (int64_t first = begin; first < end;) {
    const int64_t page = tile.pages[first / a.tokens_per_page] + a.first_page, offset = first % a.tokens_per_page;
    const int64_t slot = page * a.tokens_per_page + offset, left = a.tokens_per_page - offset;
    const int64_t count = left < end - first ? left : end - first;
    use(slot, count);
    first += count;
  }
}

// Asks for what will be read of keys [begin, end): they lie a head's stride apart, which the processor does not guess.
static inline void prefetch_keys(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t begin,
                                 int64_t end) {
  const int64_t bytes = element_size(a.pool_type), head = a.head_dim * bytes;
  for_pages(a, tile, begin, end, [&](int64_t slot, int64_t count) {
    for (int64_t i = slot; i < slot + count; ++i) {
      const int64_t at = (i * a.kv_heads + kv_head) * head;
      for (int64_t byte = 0; byte < head; byte += 64) {
        __builtin_prefetch(static_cast<const char*>(a.k) + at + byte);
        __builtin_prefetch(static_cast<const char*>(a.v) + at + byte);
      }
    }
  });
}

// A block's keys and values to float32, `count` of them and no more: what a page holds after the row's end may be a NaN.
// So may the pages before the tile's oldest key, which were given back: zeros stand for their keys and values. Keys lie
// as columns, `padded` of them (a multiple of the vector's width), zeros after the last.
template <class S, Element E>
static inline void load_block(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count,
                              int64_t padded, const AttentionScratch<S>& s) {
  float *key = s.keys, *value = s.values;
  const int64_t oldest = tile.oldest_key(a.window) - first, unseen = oldest < 0 ? 0 : oldest < count ? oldest : count;
  for (const float* end = key + unseen * s.stride; key < end;) *key++ = *value++ = 0;
  for_pages(a, tile, first + unseen, first + count, [&](int64_t slot, int64_t keys) {
    for (int64_t i = slot; i < slot + keys; ++i, key += s.stride, value += s.stride) {
      const int64_t index = (i * a.kv_heads + kv_head) * a.head_dim;
      widen_padded<S, E>(a.k, index, a.head_dim, key);
      widen_padded<S, E>(a.v, index, a.head_dim, value);
    }
  });
  for (int64_t i = count * s.stride; i < padded * s.stride; ++i) s.keys[i] = 0;
  for (int64_t key = 0; key < padded; key += S::kWidth)
    for (int64_t d = 0; d < s.stride; d += S::kWidth)
      S::transpose(s.keys + key * s.stride + d, s.stride, s.turned + d * kKeyBlock + key, kKeyBlock);
}

template <class S>
static inline void load_block(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count,
                              int64_t padded, const AttentionScratch<S>& s) {
  switch (a.pool_type) {
    case Element::kF32: return load_block<S, Element::kF32>(a, tile, kv_head, first, count, padded, s);
    case Element::kF16: return load_block<S, Element::kF16>(a, tile, kv_head, first, count, padded, s);
    case Element::kBF16: return load_block<S, Element::kBF16>(a, tile, kv_head, first, count, padded, s);
  }
}

// Keys of a block, [low, high), that one row sees.
struct Visible {
  int64_t low, high;
};

// Scores [rows][padded] to weights relative to the rows' new best; keys that a row does not see get 0. Updates best and
// total, and gives in `shrink` what the sums so far are worth relative to the new best.
template <class S, class F>
static inline void softmax_rows(const Attention& a, const AttentionScratch<S>& s, const SoftmaxSums<S>& sums,
                                int64_t padded, F visible_to) {
  using V = typename S::V;
  for (int64_t row = 0; row < s.rows; ++row) {
    float* scores = s.scores + row * kKeyBlock;
    if (a.soft_cap > 0) {
      for (int64_t i = 0; i < padded; i += S::kWidth) S::store(scores + i, capped<S>(S::load(scores + i), a.soft_cap));
    }
    const Visible visible = visible_to(row);
    for (int64_t i = 0; i < visible.low && i < padded; ++i) scores[i] = kMinusInfinity;
    for (int64_t i = visible.high < 0 ? 0 : visible.high; i < padded; ++i) scores[i] = kMinusInfinity;
    V highest = S::load(scores);
    for (int64_t i = S::kWidth; i < padded; i += S::kWidth) highest = S::max(highest, S::load(scores + i));
    const float block_best = S::highest(highest);
    s.block_best[row] = block_best > sums.best[row] ? block_best : sums.best[row];
  }
  for (int64_t row = 0; row < s.rows; row += S::kWidth) {
    alignas(64) float offsets[S::kWidth];
    for (int64_t i = 0; i < S::kWidth; ++i) {
      const float best = row + i < s.rows ? s.block_best[row + i] : 0.0f;
      offsets[i] = best == kMinusInfinity ? 0.0f : best;
    }
    S::store(s.shrink + row, exp_nonpositive<S>(S::sub(S::load(sums.best + row), S::load(offsets))));
  }
  for (int64_t row = 0; row < s.rows; ++row) {
    float* scores = s.scores + row * kKeyBlock;
    const float best = s.block_best[row];
    const V offset = S::broadcast(best == kMinusInfinity ? 0.0f : best);
    V sum = S::zero();
    for (int64_t i = 0; i < padded; i += S::kWidth) {
      const V weight = exp_nonpositive<S>(S::sub(S::load(scores + i), offset));
      S::store(scores + i, weight);
      sum = S::add(sum, weight);
    }
    sums.total[row] = sums.total[row] * s.shrink[row] + S::sum(sum);
    sums.best[row] = best;
  }
}

// The tile's queries as rows of float32, turned and scaled.
template <class S>
static inline void load_queries(const Attention& a, const QueryTile& tile, int64_t kv_head,
                                const AttentionScratch<S>& s) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t row = 0; row < s.rows; ++row) {
    const int64_t token = tile.first_token + row / group, head = kv_head * group + row % group;
    float* query = s.query + row * s.stride;
    widen_padded<S>(a.q_type, a.q, (token * a.heads + head) * a.head_dim, a.head_dim, query);
    if (a.cos != nullptr) rotate<S>(a.cos + token * a.rotated, a.sin + token * a.rotated, a.rotated, query);
    for (int64_t d = 0; d < s.stride; d += S::kWidth)
      S::store(query + d, S::mul(S::load(query + d), S::broadcast(a.scale)));
  }
}

// Adds keys [begin, end) to `sums`; begin is a multiple of kKeyBlock.
template <class S>
static inline void attend_keys(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t begin, int64_t end,
                               const AttentionScratch<S>& s, const SoftmaxSums<S>& sums) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t first = begin; first < end; first += kKeyBlock) {
    const int64_t count = end - first < kKeyBlock ? end - first : kKeyBlock;
    const int64_t padded = (count + S::kWidth - 1) / S::kWidth * S::kWidth;
    // A lone token is done with a block before the next has come; many tokens find it in a cache.
    const int64_t next = first + count;
    if (tile.tokens == 1) prefetch_keys(a, tile, kv_head, next, end - next < kKeyBlock ? end : next + kKeyBlock);
    load_block<S>(a, tile, kv_head, first, count, padded, s);
    combine<S>(s.rows, nullptr, s.query, s.stride, s.turned, kKeyBlock, a.head_dim, s.scores, kKeyBlock, padded);
    softmax_rows<S>(a, s, sums, padded, [&](int64_t row) {
      const int64_t position = tile.position + row / group;
      const int64_t seen = (position + 1 < tile.kv_len ? position + 1 : tile.kv_len) - first;
      return Visible{a.window > 0 ? position - a.window + 1 - first : 0, seen < count ? seen : count};
    });
    combine<S>(s.rows, s.shrink, s.scores, kKeyBlock, s.values, s.stride, count, sums.acc, s.stride, s.stride);
  }
}

// The sums over those keys of a split that the tile may see.
template <class S>
static inline void attend_one_split(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t split,
                                    const AttentionScratch<S>& s, const SoftmaxSums<S>& sums) {
  const int64_t oldest = tile.oldest_key(a.window) / kKeyBlock * kKeyBlock, newest = tile.end_key();
  const int64_t begin = split * kSplitKeys, end = begin + kSplitKeys;
  sums.clear();
  attend_keys<S>(a, tile, kv_head, oldest > begin ? oldest : begin, newest < end ? newest : end, s, sums);
}

template <class S>
static inline void write_results(const Attention& a, const QueryTile& tile, int64_t kv_head,
                                 const SoftmaxSums<S>& sums) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t row = 0; row < sums.rows; ++row) {
    float* acc = sums.acc + row * sums.stride;
    const float total = sums.total[row] == 0 ? 1.0f : sums.total[row];
    for (int64_t d = 0; d < sums.stride; d += S::kWidth)
      S::store(acc + d, S::div(S::load(acc + d), S::broadcast(total)));
    const int64_t token = tile.first_token + row / group, head = kv_head * group + row % group;
    narrow<S>(acc, a.head_dim, a.q_type, a.out, (token * a.heads + head) * a.head_dim);
  }
}

template <class S>
static void attend(const Attention& a, const QueryTile& tile, int64_t kv_head, float* memory) {
  const AttentionScratch<S> s(a, tile.tokens, memory);
  load_queries<S>(a, tile, kv_head, s);
  const SoftmaxSums<S> all = s.sums(s.all), part = s.sums(s.split);
  all.clear();
  for (int64_t split = tile.oldest_key(a.window) / kSplitKeys; split * kSplitKeys < tile.end_key(); ++split) {
    attend_one_split<S>(a, tile, kv_head, split, s, part);
    all.merge(part);
  }
  write_results<S>(a, tile, kv_head, all);
}

template <class S>
static void attend_split(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t split, float* partial,
                         float* memory) {
  const AttentionScratch<S> s(a, tile.tokens, memory);
  load_queries<S>(a, tile, kv_head, s);
  attend_one_split<S>(a, tile, kv_head, split, s, s.sums(partial));
}

template <class S>
static int64_t partial_size(const Attention& a, int64_t tokens) {
  alignas(64) float none[1];
  const AttentionScratch<S> s(a, tokens, none);
  return (SoftmaxSums<S>::size(s.rows, s.stride) + 15) / 16 * 16;
}

template <class S>
static void merge_splits(const Attention& a, const QueryTile& tile, int64_t kv_head, const float* partials,
                         int64_t splits, float* memory) {
  const AttentionScratch<S> s(a, tile.tokens, memory);
  const SoftmaxSums<S> all = s.sums(s.all);
  all.clear();
  const int64_t size = partial_size<S>(a, tile.tokens);
  for (int64_t split = 0; split < splits; ++split) all.merge(s.sums(const_cast<float*>(partials) + split * size));
  write_results<S>(a, tile, kv_head, all);
}

}  // namespace jaxkv
