// Where the keys of a lone token lie, and those that are read after them: asked for one by one where a key is used.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace jaxkv {
namespace {

// Rows of a pool's first K/V head, in elements, for every key of a block. Keys that the token does not see have the row
// of one that it sees: what is where they were may be a nan.
class KeyRows {
 public:
  // The keys of a task, up to `stop_key`, and behind them those that come after.
  KeyRows(const Attention& a, const QueryTile& tile, HeadRange, NextKeys after, int64_t stop_key = INT64_MAX)
      : a_(a), tile_(tile), after_(after), end_(tile.end_key() < stop_key ? tile.end_key() : stop_key) {}

  // The block at `first` is read now.
  void reading(int64_t first) {
    const int64_t oldest = tile_.oldest_key(a_.window);
    unseen_ = oldest > first ? oldest - first : 0;
    const int64_t following = first + kKeyBlock;
    fill(tile_, first, end_, now_);
    if (following < end_) {
      fill(tile_, following, end_, next_);
    } else if (after_.tile != nullptr) {
      fill(*after_.tile, after_.first / kKeyBlock * kKeyBlock, after_.tile->end_key(), next_);
    } else {
      for (int64_t i = 0; i < kKeyBlock; ++i) next_[i] = now_[i];
    }
  }

  const int64_t* now() const { return now_; }
  int64_t unseen() const { return unseen_; }  // keys of the block before the oldest that the token sees
  // Those of the block that comes next, or the same ones again.
  const int64_t* next() const { return next_; }

  // Whoever uses a key asks for one of the next.
  void ask(int64_t) {}

 private:
  void fill(const QueryTile& tile, int64_t first, int64_t end, int64_t* rows) const {
    const int64_t oldest = tile.oldest_key(a_.window), begin = first > oldest ? first : oldest;
    const int64_t stop = first + kKeyBlock < end ? first + kKeyBlock : end, row = a_.kv_heads * a_.head_dim;
    for (int64_t key = begin; key < stop;) {
      const int64_t offset = key % a_.tokens_per_page, left = a_.tokens_per_page - offset;
      const int64_t page = tile.pages[key / a_.tokens_per_page] + a_.first_page;
      int64_t at = (page * a_.tokens_per_page + offset) * row;
      const int64_t last = left < stop - key ? key + left : stop;
      for (; key < last; ++key, at += row) rows[key - first] = at;
    }
    for (int64_t i = 0; i < begin - first; ++i) rows[i] = rows[begin - first];
    for (int64_t i = stop - first; i < kKeyBlock; ++i) rows[i] = rows[stop - 1 - first];
  }

  const Attention& a_;
  const QueryTile& tile_;
  NextKeys after_;
  int64_t end_, unseen_ = 0;
  int64_t now_[kKeyBlock], next_[kKeyBlock];
};

}  // namespace
}  // namespace jaxkv
