// Keys and values asked for before they are read. The processor does not guess which page comes next, and holds few
// requests at a time: asked for all at once they would keep it waiting as long as reading them, so a block's work asks
// for a few lines of the next block here and there.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace jaxkv {
namespace {

class KeysAhead {
 public:
  // The keys of a task, up to `stop_key`, and behind them those that come after.
  KeysAhead(const Attention& a, const QueryTile& tile, HeadRange heads, NextKeys after, int64_t stop_key = INT64_MAX)
      : a_(a),
        tile_(&tile),
        after_(after.tile),
        end_(tile.end_key() < stop_key ? tile.end_key() : stop_key),
        slot_bytes_(a.kv_heads * head_bytes()),
        first_byte_(heads.first * head_bytes()),
        bytes_(heads.count * head_bytes()),
        byte_(bytes_) {
    const int64_t block_end = (end_ + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
    after_begin_ = block_end + after.first % kKeyBlock;
    shift_ = after.first - after_begin_;
    after_end_ = after_ == nullptr ? 0 : after_->end_key() - shift_;
  }

  // The block at `first` is read now: `ask` is for the next ones.
  void reading(int64_t first) {
    limit_ = first + (1 + kBlocks) * kKeyBlock;
    if (next_ < first + kKeyBlock) go_to(first + kKeyBlock);
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
  static constexpr int64_t kBlocks = 2;  // short ones leave little time for the next

  int64_t head_bytes() const { return a_.head_dim * element_size(a_.pool_type); }
  void go_to(int64_t key) {
    next_ = key;
    left_in_page_ = 0;
    byte_ = bytes_;
  }

  bool next_key() {
    if (next_ >= end_ && next_ < after_begin_) go_to(after_begin_);
    if (next_ >= limit_ || next_ >= (next_ < end_ ? end_ : after_end_)) return false;
    byte_ = 0;
    if (left_in_page_ > 0) {
      --left_in_page_;
      k_ += slot_bytes_;
      v_ += slot_bytes_;
    } else {
      const bool is_own = next_ < end_;
      const int64_t key = is_own ? next_ : next_ + shift_, offset = key % a_.tokens_per_page;
      const int64_t page = (is_own ? tile_ : after_)->pages[key / a_.tokens_per_page] + a_.first_page;
      const int64_t at = (page * a_.tokens_per_page + offset) * slot_bytes_ + first_byte_;
      k_ = static_cast<const char*>(a_.k) + at;
      v_ = static_cast<const char*>(a_.v) + at;
      left_in_page_ = a_.tokens_per_page - offset - 1;
    }
    ++next_;
    return true;
  }

  const Attention& a_;
  const QueryTile *tile_, *after_;
  int64_t end_, slot_bytes_, first_byte_, bytes_, byte_;
  // Keys that come after are counted on from the end of the task's last block: `shift_` more is their position.
  int64_t after_begin_, after_end_, shift_;
  int64_t next_ = 0, limit_ = 0, left_in_page_ = 0;
  const char *k_ = nullptr, *v_ = nullptr;
};

}  // namespace
}  // namespace jaxkv
