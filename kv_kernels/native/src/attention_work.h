// How the attention of a call is cut into tasks: which tiles, which K/V heads, which of the keys.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "kernels.h"

namespace jaxkv {

constexpr int64_t kTileQueries = 192;  // query rows (tokens times group) of a tile, about: a block of K/V serves them all

// All keys of a tile, or one split of them.
struct AttentionTask {
  const QueryTile* tile;
  HeadRange heads;
  int64_t split;  // -1 for all keys
  int64_t sums;   // of a split: where those of the first head go, in floats
};

// A tile whose result is put together from its splits, in order: places [first, last).
struct AttentionMerge {
  const QueryTile* tile;
  size_t first, last;
};

// Rows whose keys in a split are on the same pages, since they share a prefix, read them together: one tile of the tokens
// of all of them. What a row's sums come to does not depend on who is beside it.
class AttentionWork {
 public:
  // `a`, of which the sizes are read, and `tiles` stay where they are while this stands.
  AttentionWork(const Attention& a, const std::vector<QueryTile>& tiles, int64_t threads);

  const std::vector<AttentionTask>& tasks() const { return tasks_; }
  // What a thread reads after a task, if it goes on with the next one.
  NextKeys after(int64_t task) const;
  const std::vector<AttentionMerge>& merges() const { return merges_; }
  const SplitPlace* places() const { return places_.data(); }
  int64_t floats() const { return floats_; }  // of all sums

 private:
  using Tiles = std::vector<const QueryTile*>;

  void share_splits(const Tiles& few);
  void share_split(const Tiles& members, int64_t split);
  void add_splits(const QueryTile& tile, int64_t heads);
  int64_t keys_of(const QueryTile& tile) const { return tile.end_key() - tile.oldest_key(a_.window); }
  int64_t shared_keys(const QueryTile& tile) const {
    return static_cast<int64_t>(shared_[static_cast<size_t>(&tile - begin_)].size()) * kSplitKeys;
  }
  int64_t take_sums(int64_t tokens);

  const Attention& a_;
  const QueryTile* begin_;
  std::vector<std::vector<SplitPlace>> shared_;  // of every tile: its first splits, those that it shares
  std::deque<std::vector<int32_t>> members_;     // tokens of the tiles below
  std::deque<QueryTile> together_;
  std::vector<AttentionTask> tasks_;
  std::vector<AttentionMerge> merges_;
  std::vector<SplitPlace> places_;
  int64_t floats_ = 0;
};

}  // namespace jaxkv
