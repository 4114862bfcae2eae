// Where the keys of a lone token lie, and those that are read after them: asked for one by one where a key is used.
#pragma once

#include <cstdint>

#include "attention_softmax.h"

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
    const int64_t oldest = tile_.oldest_key(a_.window), begin = first > oldest ? first : oldest;
    const int64_t stop = first + kKeyBlock < end_ ? first + kKeyBlock : end_;
    unseen_ = begin - first;
    int64_t* row = fill(tile_, begin, stop, now_ + unseen_);
    for (int64_t i = 0; i < unseen_; ++i) now_[i] = now_[unseen_];
    for (; row < now_ + kKeyBlock; ++row) *row = row[-1];
    // Those that come a block's length later, of this task or the next one: as many as this block has, or a short one
    // would wait for a whole one.
    for (int64_t i = 0; i < kKeyBlock; ++i) next_[i] = now_[i];
    int64_t* later = next_ + unseen_;
    const int64_t own = begin + kKeyBlock < end_ ? begin + kKeyBlock : end_;
    const int64_t own_stop = stop + kKeyBlock < end_ ? stop + kKeyBlock : end_;
    later = fill(tile_, own, own_stop, later);
    if (after_.tile == nullptr) return;
    const int64_t behind = begin + kKeyBlock - end_, end = after_.tile->end_key();  // of the next task's keys
    const int64_t from = after_.first + (behind > 0 ? behind : 0), to = from + (stop - first) - (later - next_);
    if (from < end) fill(*after_.tile, from, to < end ? to : end, later);
  }

  const int64_t* now() const { return now_; }
  int64_t unseen() const { return unseen_; }  // keys of the block before the oldest that the token sees
  // For every key one that is read later, or the same one again.
  const int64_t* next() const { return next_; }

  // Whoever uses a key asks for one of the next.
  void ask(int64_t) {}

 private:
  // The rows of keys [begin, end) of a tile; where the next ones belong.
  int64_t* fill(const QueryTile& tile, int64_t begin, int64_t end, int64_t* rows) const {
    const int64_t row = a_.kv_heads * a_.head_dim;
    for_pages(a_, tile, begin, end, [&](int64_t slot, int64_t count) {
      for (int64_t i = 0; i < count; ++i) *rows++ = (slot + i) * row;
    });
    return rows;
  }

  const Attention& a_;
  const QueryTile& tile_;
  NextKeys after_;
  int64_t end_, unseen_ = 0;
  int64_t now_[kKeyBlock], next_[kKeyBlock];
};

}  // namespace
}  // namespace jaxkv
