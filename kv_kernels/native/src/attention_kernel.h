// Ragged paged attention of one instruction set: one tile of query tokens, all query heads of one K/V head.
//
// Keys are taken in blocks of kKeyBlock counted from position 0, each read once and used by every query row of the tile
// (group heads times tokens). Scores are dot products over head_dim in one order, a block's weights are summed in one
// order, and a key that a row may not see has weight exactly 0: so a row's bits do not depend on the other rows of its
// tile. Sums over kSplitKeys keys, counted from position 0 as well, are taken apart and merged in order, always: so it
// does not matter whether one thread did all of them. `Block` is how keys are scored, weighed and added up.
#pragma once

#include <cstdint>

#include "attention_block.h"

namespace jaxkv {
namespace {

template <class Block>
static int64_t attend_scratch(const Attention& a, int64_t tokens) {
  alignas(64) float none[1];
  return Block(a, tokens, none).size();
}

// The K/V heads of a task, each with a block of its own.
template <class Block>
class Heads {
 public:
  Heads(const Attention& a, const QueryTile& tile, HeadRange heads, typename Block::Ahead& ahead, float* memory)
      : a_(a), tile_(tile), heads_(heads), ahead_(ahead), memory_(memory), size_(attend_scratch<Block>(a, tile.tokens)) {
    each([&](int64_t head, const Block& block) { block.begin(a, tile, heads.first + head); });
  }

  template <class F>
  void each(F use) const {
    for (int64_t head = 0; head < heads_.count; ++head) use(head, Block(a_, tile_.tokens, memory_ + head * size_));
  }

  // The sums over those keys of a split that the tile may see: of head h to sums_of(h, its block).
  template <class F>
  void attend_split(int64_t split, F sums_of) const {
    const int64_t oldest = tile_.oldest_key(a_.window) / kKeyBlock * kKeyBlock, newest = tile_.end_key();
    const int64_t begin = split * kSplitKeys, end = begin + kSplitKeys < newest ? begin + kSplitKeys : newest;
    each([&](int64_t head, const Block& block) { block.begin_split(sums_of(head, block)); });
    for (int64_t first = oldest > begin ? oldest : begin; first < end; first += kKeyBlock) {
      const int64_t count = end - first < kKeyBlock ? end - first : kKeyBlock;
      ahead_.reading(first);
      each([&](int64_t head, const Block& block) {
        attend_block(first, count, heads_.first + head, block, sums_of(head, block));
      });
    }
    each([&](int64_t head, const Block& block) { block.finish_split(sums_of(head, block)); });
  }

 private:
  using S = typename Block::Simd;

  void attend_block(int64_t first, int64_t count, int64_t kv_head, const Block& block,
                    const SoftmaxSums<S>& sums) const {
    const int64_t padded = (count + S::kWidth - 1) / S::kWidth * S::kWidth, group = a_.heads / a_.kv_heads;
    block.score(a_, tile_, kv_head, first, count, padded, ahead_);
    block.soften(a_, sums, padded, ahead_, [&](int64_t row) {
      const int64_t position = tile_.position + row / group;
      const int64_t seen = (position + 1 < tile_.kv_len ? position + 1 : tile_.kv_len) - first;
      return Visible{a_.window > 0 ? position - a_.window + 1 - first : 0, seen < count ? seen : count};
    });
    block.weigh(a_, kv_head, count, sums, ahead_);
  }

  const Attention& a_;
  const QueryTile& tile_;
  HeadRange heads_;
  typename Block::Ahead& ahead_;
  float* memory_;
  int64_t size_;
};

template <class S>
static inline void write_results(const Attention& a, const QueryTile& tile, int64_t kv_head,
                                 const SoftmaxSums<S>& sums) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t row = 0; row < sums.rows; ++row) {
    float* acc = sums.acc + row * sums.stride;
    const typename S::V share = S::broadcast(sums.total[row] == 0 ? 1.0f : 1.0f / sums.total[row]);
    for (int64_t d = 0; d < sums.stride; d += S::kWidth) S::store(acc + d, S::mul(S::load(acc + d), share));
    const int64_t token = tile.token(row / group), head = kv_head * group + row % group;
    narrow<S>(acc, a.head_dim, a.q_type, a.out, (token * a.heads + head) * a.head_dim);
  }
}

template <class S>
static int64_t partial_size(const Attention& a, int64_t tokens) {
  alignas(64) float none[1];
  const SoftmaxScratch<S> s(a, tokens, none);
  return (SoftmaxSums<S>::size(s.rows, s.stride) + 15) / 16 * 16;
}

template <class Block>
static void attend(const Attention& a, const QueryTile& tile, HeadRange heads, NextKeys next, float* memory) {
  typename Block::Ahead ahead(a, tile, heads, next);
  const Heads<Block> all(a, tile, heads, ahead, memory);
  int64_t split = tile.oldest_key(a.window) / kSplitKeys;
  all.attend_split(split, [](int64_t, const Block& block) { return block.sums(block.all); });
  while (++split * kSplitKeys < tile.end_key()) {
    all.attend_split(split, [](int64_t, const Block& block) { return block.sums(block.split); });
    all.each([](int64_t, const Block& block) { block.sums(block.all).merge(block.sums(block.split)); });
  }
  all.each([&](int64_t head, const Block& block) {
    write_results(a, tile, heads.first + head, block.sums(block.all));
  });
}

template <class Block>
static void attend_split(const Attention& a, const QueryTile& tile, HeadRange heads, int64_t split, NextKeys next,
                         float* partials, float* memory) {
  const int64_t size = partial_size<typename Block::Simd>(a, tile.tokens);
  typename Block::Ahead ahead(a, tile, heads, next, (split + 1) * kSplitKeys);
  Heads<Block>(a, tile, heads, ahead, memory).attend_split(split, [&](int64_t head, const Block& block) {
    return block.sums(partials + head * size);
  });
}

template <class S>
static void merge_splits(const Attention& a, const QueryTile& tile, int64_t kv_head, const float* sums,
                         const SplitPlace* first, const SplitPlace* last, float* memory) {
  const SoftmaxScratch<S> s(a, tile.tokens, memory);
  const SoftmaxSums<S> all = s.sums(s.all);
  const auto of = [&](const SplitPlace& place) {
    float* of_head = const_cast<float*>(sums) + place.sums + kv_head * place.head_floats;
    return SoftmaxSums<S>(place.rows, s.stride, of_head).from(place.first_row);
  };
  all.copy(of(*first));
  for (const SplitPlace* place = first + 1; place < last; ++place) all.merge(of(*place));
  write_results<S>(a, tile, kv_head, all);
}

}  // namespace
}  // namespace jaxkv
