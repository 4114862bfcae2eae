// Rows of a weight that are read next, asked for a few lines at a time: all at once they would keep the processor waiting as
// long as reading them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace jaxkv {
namespace {

class RowsAhead {
 public:
  RowsAhead() = default;
  // Rows [first, first + rows) of a weight with a float16 for every block, in rows or in tiles.
  static RowsAhead of_blocks(const WeightView& weight, int64_t first, int64_t rows) {
    RowsAhead ahead;
    const int64_t left = weight.out_features > first ? weight.out_features - first : 0;
    const int64_t blocks = weight.in_features / kQuantBlock, count = (rows < left ? rows : left) * blocks;
    const int64_t quant_bytes = weight.kind == WeightKind::kQ8_0 ? 32 : 16;
    ahead.add(weight.values, first * blocks * quant_bytes, count * quant_bytes);
    ahead.add(weight.scales, first * blocks * 2, count * 2);
    ahead.add(weight.mins, first * blocks * 2, count * 2);
    return ahead;
  }
  int64_t lines() const {
    int64_t lines = 0;
    for (size_t i = 0; i < count_; ++i) lines += (ranges_[i].end - ranges_[i].at + 63) / 64;
    return lines;
  }
  void ask(int64_t lines) {
    for (; lines > 0 && next_ < count_; --lines) {
      Range& range = ranges_[next_];
      __builtin_prefetch(range.at, 0, 2);
      range.at += 64;
      if (range.at >= range.end) ++next_;
    }
  }

 private:
  struct Range {
    const char *at, *end;
  };
  void add(const void* base, int64_t offset, int64_t size) {
    if (base == nullptr || size == 0) return;
    const char* at = static_cast<const char*>(base) + offset;
    ranges_[count_++] = {at - reinterpret_cast<uintptr_t>(at) % 64, at + size};
  }

  Range ranges_[3];
  size_t count_ = 0, next_ = 0;
};

}  // namespace
}  // namespace jaxkv
