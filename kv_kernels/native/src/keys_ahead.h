// Keys and values asked for before they are read. The processor does not guess which page comes next, and holds few
// requests at a time: asked for all at once they would keep it waiting as long as reading them, so a block's work asks
// for a few lines of the next block here and there.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace jaxkv {

class KeysAhead {
 public:
  // Blocks of kKeyBlock keys of a tile up to `stop_key`, and the first one after them. Only lone tokens wait for keys:
  // many find a block in a cache when they are done with the last.
  KeysAhead(const Attention& a, HeadRange heads, NextKeys after, int64_t stop_key = INT64_MAX)
      : a_(a),
        after_(after),
        stop_key_(stop_key),
        slot_bytes_(a.kv_heads * head_bytes()),
        first_byte_(heads.first * head_bytes()),
        bytes_(heads.count * head_bytes()) {}

  // The block at `first` of `tile` is read now: `ask` is for the one after it.
  void reading(const QueryTile& tile, int64_t first) {
    const int64_t following = first + kKeyBlock;
    const bool is_last = following >= tile.end_key() || following >= stop_key_;
    tile_ = is_last ? after_.tile : &tile;
    key_ = is_last ? after_.first : following;
    end_ = 0;
    if (tile.tokens > 1 || tile_ == nullptr) return;
    const int64_t block_end = (key_ / kKeyBlock + 1) * kKeyBlock, end = tile_->end_key();
    end_ = block_end < end ? block_end : end;
    byte_ = bytes_;
    --key_;
    left_in_page_ = 0;
  }

  // Asks for so many lines of keys, and as many of values.
  void ask(int64_t lines) {
    for (; lines > 0; --lines, byte_ += 64) {
      if (byte_ >= bytes_ && !next_key()) return;
      __builtin_prefetch(k_ + byte_, 0, 2);
      __builtin_prefetch(v_ + byte_, 0, 2);
    }
  }

 private:
  int64_t head_bytes() const { return a_.head_dim * element_size(a_.pool_type); }

  bool next_key() {
    if (key_ + 1 >= end_) return false;
    ++key_;
    byte_ = 0;
    if (left_in_page_ > 0) {
      --left_in_page_;
      k_ += slot_bytes_;
      v_ += slot_bytes_;
      return true;
    }
    const int64_t page = tile_->pages[key_ / a_.tokens_per_page] + a_.first_page, offset = key_ % a_.tokens_per_page;
    const int64_t at = (page * a_.tokens_per_page + offset) * slot_bytes_ + first_byte_;
    k_ = static_cast<const char*>(a_.k) + at;
    v_ = static_cast<const char*>(a_.v) + at;
    left_in_page_ = a_.tokens_per_page - offset - 1;
    return true;
  }

  const Attention& a_;
  NextKeys after_;
  const QueryTile* tile_ = nullptr;
  int64_t stop_key_, slot_bytes_, first_byte_, bytes_;
  int64_t key_ = 0, end_ = 0, byte_ = 0, left_in_page_ = 0;
  const char *k_ = nullptr, *v_ = nullptr;
};

}  // namespace jaxkv
