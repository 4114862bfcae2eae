// What attention with numbers of any width has in common: the online softmax, and the pages of a block of keys.
#pragma once

#include <cstdint>

#include "elementwise.h"

namespace jaxkv {
namespace {

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

  // Those of the rows from `row` on.
  SoftmaxSums from(int64_t row) const {
    SoftmaxSums some = *this;
    some.rows -= row, some.best += row, some.total += row, some.acc += row * stride;
    return some;
  }

  void clear() const {
    for (int64_t row = 0; row < (rows + 15) / 16 * 16; ++row) best[row] = kMinusInfinity, total[row] = 0;
    for (int64_t i = 0; i < rows * stride; ++i) acc[i] = 0;
  }

  // The sums of the first of the rows of `from`. Whole vectors of rows are read, of it and of `more` below: what is behind
  // the last row is of no use, and in the same memory.
  void copy(const SoftmaxSums& from) const {
    for (int64_t row = 0; row < rows; row += S::kWidth) {
      S::store(best + row, S::load(from.best + row));
      S::store(total + row, S::load(from.total + row));
    }
    for (int64_t i = 0; i < rows * stride; i += S::kWidth) S::store(acc + i, S::load(from.acc + i));
  }

  // The sums over these keys and those of `more`.
  void merge(const SoftmaxSums& more) const {
    using V = typename S::V;
    alignas(64) float mine[S::kWidth], theirs[S::kWidth];
    for (int64_t first = 0; first < rows; first += S::kWidth) {
      const V best_before = S::load(best + first), best_of_more = S::load(more.best + first);
      const V highest = S::max(best_before, best_of_more);
      // Where neither has seen a key both count nothing.
      const V offset = S::max(highest, S::broadcast(-__FLT_MAX__));
      const V kept = exp_nonpositive<S>(S::sub(best_before, offset));
      const V added = exp_nonpositive<S>(S::sub(best_of_more, offset));
      S::store(mine, kept);
      S::store(theirs, added);
      S::store(best + first, highest);
      const V total_of_more = S::mul(S::load(more.total + first), added);
      S::store(total + first, S::fma(S::load(total + first), kept, total_of_more));
      for (int64_t row = first; row < rows && row < first + S::kWidth; ++row) {
        const V keep = S::broadcast(mine[row - first]), add = S::broadcast(theirs[row - first]);
        for (int64_t d = 0; d < stride; d += S::kWidth) {
          float* to = acc + row * stride + d;
          S::store(to, S::fma(S::load(more.acc + row * stride + d), add, S::mul(S::load(to), keep)));
        }
      }
    }
  }
};

// Scratch of one tile's rows: scores of a block of keys and the sums. What else a block needs is taken behind it.
template <class S>
struct SoftmaxScratch {
  int64_t stride;  // head_dim rounded up to the vector's width
  int64_t rows;
  float *scores, *shrink, *block_best, *block_sum, *all, *split;

  SoftmaxScratch(const Attention& a, int64_t tokens, float* memory)
      : stride((a.head_dim + S::kWidth - 1) / S::kWidth * S::kWidth), rows(tokens * (a.heads / a.kv_heads)),
        memory_(memory), next_(memory) {
    scores = take(rows * kKeyBlock);
    shrink = take(rows + S::kWidth);
    block_best = take(rows + S::kWidth);
    block_sum = take(rows + S::kWidth);
    all = take(SoftmaxSums<S>::size(rows, stride));
    split = take(SoftmaxSums<S>::size(rows, stride));
  }
  SoftmaxSums<S> sums(float* memory) const { return {rows, stride, memory}; }
  int64_t size() const { return next_ - memory_; }

 protected:
  float* take(int64_t floats) {
    float* part = next_;
    next_ += (floats + 15) / 16 * 16;
    return part;
  }

 private:
  float *memory_, *next_;
};

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

// Keys of a block, [low, high), that one row sees.
struct Visible {
  int64_t low, high;
};

// Scores [rows][padded] to weights relative to the rows' new best; keys that a row does not see get 0. Updates best and
// total, and gives in `shrink` what the sums so far are worth relative to the new best. `exp` is of numbers up to 0.
template <class S, class A, class F, class E>
static inline void softmax_rows(const Attention& a, const SoftmaxScratch<S>& s, const SoftmaxSums<S>& sums,
                                int64_t padded, A& ahead, F visible_to, E exp) {
  using V = typename S::V;
  for (int64_t row = 0; row < s.rows; ++row) {
    ahead.ask(3);
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
    S::store(s.shrink + row, exp(S::sub(S::load(sums.best + row), S::load(offsets))));
  }
  for (int64_t row = 0; row < s.rows; ++row) {
    ahead.ask(3);
    float* scores = s.scores + row * kKeyBlock;
    const float best = s.block_best[row];
    const V offset = S::broadcast(best == kMinusInfinity ? 0.0f : best);
    V sum = S::zero();
    for (int64_t i = 0; i < padded; i += S::kWidth) {
      const V weight = exp(S::sub(S::load(scores + i), offset));
      S::store(scores + i, weight);
      sum = S::add(sum, weight);
    }
    s.block_sum[row] = S::sum(sum);
    sums.best[row] = best;
  }
  for (int64_t row = 0; row < s.rows; row += S::kWidth)
    S::store(sums.total + row, S::fma(S::load(sums.total + row), S::load(s.shrink + row), S::load(s.block_sum + row)));
}

// One query, turned and scaled, as float32 [stride].
template <class S>
static inline void load_query(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t row, int64_t stride,
                              float* query) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t token = tile.token(row / group), head = kv_head * group + row % group;
  widen_padded<S>(a.q_type, a.q, (token * a.heads + head) * a.head_dim, a.head_dim, query);
  if (a.cos != nullptr) rotate<S>(a.cos + token * a.rotated, a.sin + token * a.rotated, a.rotated, query);
  for (int64_t d = 0; d < stride; d += S::kWidth)
    S::store(query + d, S::mul(S::load(query + d), S::broadcast(a.scale)));
}

}  // namespace
}  // namespace jaxkv
