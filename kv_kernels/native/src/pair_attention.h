// Attention of bfloat16 queries over bfloat16 pools on vectors of pairs: scores and weighed values in bfloat16 summed in
// float32, the softmax in float32. A block's weights are rounded to bfloat16 where they meet the values; their sum is
// taken before.
#pragma once

#include <cstring>

#include "attention_kernel.h"
#include "bf16_functions.h"
#include "combine.h"
#include "pair_simd.h"

namespace jaxkv {
namespace {

inline bool in_pairs(const Attention& a) {
  return a.q_type == Element::kBF16 && a.pool_type == Element::kBF16 && a.head_dim % kPairStep == 0;
}

// Numbers as pairs of those that follow each other; the last whole vector of them is read.
static void narrow_row(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kPairStep)
    _mm512_storeu_si512(to + i / 2, narrowed(_mm512_loadu_ps(from + i), _mm512_loadu_ps(from + i + 16)));
}

// What blocks of pairs have in common, few rows or many.
struct PairSoftmax : SoftmaxScratch<Avx512Simd> {
  using Simd = Avx512Simd;
  float *queries;  // [rows][head_dim / 2] pairs of dimensions
  float *shares;   // [rows][kKeyBlock / 2] pairs of keys
  float *query;    // [head_dim]

  PairSoftmax(const Attention& a, int64_t tokens, float* memory) : SoftmaxScratch<Avx512Simd>(a, tokens, memory) {
    queries = take(rows * a.head_dim / 2);
    shares = take(rows * kKeyBlock / 2);
    query = take(a.head_dim);
  }

  void begin(const Attention& a, const QueryTile& tile, int64_t kv_head) const {
    for (int64_t row = 0; row < rows; ++row) {
      load_query<Avx512Simd>(a, tile, kv_head, row, a.head_dim, query);
      narrow_row(query, a.head_dim, queries + row * a.head_dim / 2);
    }
  }
  void begin_split(const SoftmaxSums<Avx512Simd>& sums) const { sums.clear(); }
  void finish_split(const SoftmaxSums<Avx512Simd>&) const {}

  // What softmax_rows does, in registers: a row of a block is four vectors, and sixteen rows are summed across at once. The
  // weights go straight to `shares`, zeros for keys that are not seen.
  template <class A, class F>
  void soften(const Attention& a, const SoftmaxSums<Avx512Simd>& sums, int64_t, A& ahead, F visible_to) const {
    // The first row is the one that sees least, unless there is a window.
    if (a.window <= 0 && keys_of(visible_to(0)) == kAllKeys) {
      soften_seen<true>(a, sums, ahead, visible_to);
    } else {
      soften_seen<false>(a, sums, ahead, visible_to);
    }
  }

 private:
  static constexpr int kVectors = kKeyBlock / 16;
  static constexpr uint64_t kAllKeys = ~uint64_t{0};
  static_assert(kVectors == 4 && kKeyBlock == 64);

  template <bool kAll, class A, class F>
  void soften_seen(const Attention& a, const SoftmaxSums<Avx512Simd>& sums, A& ahead, F visible_to) const {
    const __m512 none = _mm512_set1_ps(kMinusInfinity);
    for (int64_t first = 0; first < rows; first += 16) {
      const int64_t count = rows - first < 16 ? rows - first : 16;
      uint64_t seen[16];
      __m512 across[16];
      for (int64_t i = 0; i < count; ++i) {
        ahead.ask(3);
        float* of_row = scores + (first + i) * kKeyBlock;
        seen[i] = kAll ? kAllKeys : keys_of(visible_to(first + i));
        __m512 v[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          const auto some = static_cast<__mmask16>(kAll ? kAllKeys : seen[i] >> 16 * j);
          v[j] = _mm512_mask_loadu_ps(none, some, of_row + 16 * j);
          if (a.soft_cap > 0) {
            v[j] = _mm512_mask_mov_ps(none, some, capped<Avx512Simd>(v[j], a.soft_cap));
            _mm512_storeu_ps(of_row + 16 * j, v[j]);
          }
        }
        across[i] = _mm512_max_ps(_mm512_max_ps(v[0], v[1]), _mm512_max_ps(v[2], v[3]));
      }
      const auto larger = [](__m512 left, __m512 right) { return _mm512_max_ps(left, right); };
      const __m512 before = _mm512_loadu_ps(sums.best + first);
      const __m512 best = _mm512_max_ps(reduce_rows(across, count, larger), before);
      const __m512 offset = _mm512_mask_mov_ps(best, _mm512_cmpeq_ps_mask(best, none), _mm512_setzero_ps());
      const __m512 kept = quick_exp(_mm512_sub_ps(before, offset));
      alignas(64) float offsets[16];
      _mm512_store_ps(offsets, offset);
      _mm512_storeu_ps(sums.best + first, best);
      _mm512_storeu_ps(shrink + first, kept);
      for (int64_t i = 0; i < count; ++i) {
        ahead.ask(3);
        const float* of_row = scores + (first + i) * kKeyBlock;
        __m512 v[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          const auto some = static_cast<__mmask16>(kAll ? kAllKeys : seen[i] >> 16 * j);
          v[j] = _mm512_mask_loadu_ps(none, some, of_row + 16 * j);
          v[j] = quick_exp(_mm512_sub_ps(v[j], _mm512_set1_ps(offsets[i])));
        }
        float* to = shares + (first + i) * kKeyBlock / 2;
        _mm512_storeu_si512(to, narrowed(v[0], v[1]));
        _mm512_storeu_si512(to + 16, narrowed(v[2], v[3]));
        across[i] = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(v[0], v[1]), v[2]), v[3]);
      }
      const auto sum = [](__m512 left, __m512 right) { return _mm512_add_ps(left, right); };
      const __m512 total = _mm512_loadu_ps(sums.total + first);
      _mm512_storeu_ps(sums.total + first, _mm512_fmadd_ps(total, kept, reduce_rows(across, count, sum)));
    }
  }

  // A bit for every key of a block that a row sees.
  static uint64_t keys_of(Visible visible) {
    const int64_t low = visible.low < 0 ? 0 : visible.low, high = visible.high;
    return high <= low || low >= kKeyBlock ? 0 : ~uint64_t{0} >> (kKeyBlock - (high - low)) << low;
  }

  // Number i is what `combine` makes of all numbers of v[i], and anything behind the first `count`.
  template <class F>
  static __m512 reduce_rows(__m512* v, int64_t count, F combine) {
    __m512i numbers[16];
    for (int64_t i = 0; i < 16; ++i) numbers[i] = _mm512_castps_si512(v[i < count ? i : 0]);
    return _mm512_castsi512_ps(reduce_each(numbers, [&](__m512i left, __m512i right) {
      return _mm512_castps_si512(combine(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right)));
    }));
  }
};

struct PairBlock : PairSoftmax {
  using Ahead = KeysAhead;
  float *keys;      // [head_dim / 2][kKeyBlock] pairs of dimensions
  float *values;    // [kKeyBlock / 2][head_dim] pairs of keys
  uint16_t *zeros;  // [head_dim]

  PairBlock(const Attention& a, int64_t tokens, float* memory) : PairSoftmax(a, tokens, memory) {
    keys = take(a.head_dim / 2 * kKeyBlock);
    values = take(kKeyBlock / 2 * a.head_dim);
    zeros = reinterpret_cast<uint16_t*>(take(a.head_dim / 2));
  }

  void begin(const Attention& a, const QueryTile& tile, int64_t kv_head) const {
    std::memset(zeros, 0, static_cast<size_t>(a.head_dim) * 2);
    PairSoftmax::begin(a, tile, kv_head);
  }
  void score(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count,
             int64_t padded, KeysAhead& ahead) const {
    load(a, tile, kv_head, first, count, padded, ahead);
    combine<PairSimd>(rows, nullptr, queries, a.head_dim / 2, keys, kKeyBlock, a.head_dim / 2, scores, kKeyBlock,
                      padded);
  }
  void weigh(const Attention&, int64_t, int64_t count, const SoftmaxSums<Avx512Simd>& sums, KeysAhead&) const {
    combine<PairSimd>(rows, shrink, shares, kKeyBlock / 2, values, stride, (count + 1) / 2, sums.acc, stride, stride);
  }

 private:
  // `count` keys and their values; zeros after them and for pages that were given back.
  void load(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count, int64_t padded,
            KeysAhead& ahead) const {
    const uint16_t *key_rows[kKeyBlock], *value_rows[kKeyBlock];
    const int64_t oldest = tile.oldest_key(a.window) - first, unseen = oldest < 0 ? 0 : oldest < count ? oldest : count;
    for (int64_t i = 0; i < padded; ++i)
      if (i < unseen || i >= count) key_rows[i] = value_rows[i] = zeros;
    int64_t key = unseen;
    for_pages(a, tile, first + unseen, first + count, [&](int64_t slot, int64_t number) {
      for (int64_t i = slot; i < slot + number; ++i, ++key) {
        const int64_t at = (i * a.kv_heads + kv_head) * a.head_dim;
        key_rows[key] = static_cast<const uint16_t*>(a.k) + at;
        value_rows[key] = static_cast<const uint16_t*>(a.v) + at;
      }
    });
    for (int64_t begin = 0; begin < padded; begin += 16) {
      for (int64_t d = 0; d < a.head_dim; d += kPairStep) {
        __m512i v[16];
        for (int i = 0; i < 16; ++i) v[i] = _mm512_loadu_si512(key_rows[begin + i] + d);
        ahead.ask(8);
        transpose(v);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(keys + (d / 2 + i) * kKeyBlock + begin, v[i]);
      }
    }
    const __m512i left = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), right = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t pair = 0; pair < (count + 1) / 2; ++pair) {
      for (int64_t d = 0; d < a.head_dim; d += kPairStep) {
        const __m512i even = _mm512_loadu_si512(value_rows[2 * pair] + d);
        const __m512i odd = _mm512_loadu_si512(value_rows[2 * pair + 1] + d);
        const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
        float* to = values + pair * a.head_dim + d;
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, left, high));
        _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64(low, right, high));
        ahead.ask(1);
      }
    }
  }
};

}  // namespace
}  // namespace jaxkv
