// Attention of one token over bfloat16 pools on vectors of pairs: keys and values are used as they are read, and nothing
// of them is kept. Sums are those of PairBlock, in the same order.
#pragma once

#include "key_rows.h"
#include "pair_attention.h"

namespace jaxkv {
namespace {

// kRows are the query heads of a K/V head.
template <int kRows>
struct LoneBlock : PairSoftmax {
  using Ahead = KeyRows;
  using PairSoftmax::PairSoftmax;

  void score(const Attention& a, const QueryTile&, int64_t kv_head, int64_t, int64_t, int64_t padded,
             KeyRows& ahead) const {
    const auto* keys = static_cast<const uint16_t*>(a.k) + kv_head * a.head_dim;
    for (int64_t begin = 0; begin < padded; begin += 16) {
      const int64_t *now = ahead.now() + begin, *next = ahead.next() + begin;
      __m512 sums[kRows];
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) sums[row] = _mm512_setzero_ps();
      for (int64_t d = 0; d < a.head_dim; d += kPairStep) {
        __m512i v[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          v[i] = _mm512_loadu_si512(keys + now[i] + d);
          __builtin_prefetch(keys + next[i] + d, 0, 3);
        }
        transpose(v);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) {
            const __m512 query = _mm512_set1_ps(queries[row * a.head_dim / 2 + d / 2 + i]);
            sums[row] = PairSimd::fma(query, _mm512_castsi512_ps(v[i]), sums[row]);
          }
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) _mm512_storeu_ps(scores + row * kKeyBlock + begin, sums[row]);
    }
  }
  void weigh(const Attention& a, int64_t kv_head, int64_t count, const SoftmaxSums<Avx512Simd>& sums,
             KeyRows& ahead) const {
    int64_t d = 0;
    constexpr int kSteps = kRows <= 5 ? 2 : 1;  // as many sums as there are registers for
    for (; d + kSteps * kPairStep <= a.head_dim; d += kSteps * kPairStep)
      weigh_some<kSteps>(a, kv_head, d, count, sums, ahead);
    for (; d < a.head_dim; d += kPairStep) weigh_some<1>(a, kv_head, d, count, sums, ahead);
  }

 private:
  // Dimensions [d, d + kSteps * kPairStep). The values of two keys make pairs of every second four of 32 dimensions; so
  // the sums lie meanwhile.
  template <int kSteps>
  void weigh_some(const Attention& a, int64_t kv_head, int64_t d, int64_t count, const SoftmaxSums<Avx512Simd>& sums,
                  KeyRows& ahead) const {
    const auto* values = static_cast<const uint16_t*>(a.v) + kv_head * a.head_dim + d;
    const int64_t *now = ahead.now(), *next = ahead.next();
    __m512 acc[kRows][kSteps][2];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
      for (int step = 0; step < kSteps; ++step) {
        const float* from = sums.acc + row * stride + d + step * kPairStep;
        const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(from), _mm512_set1_ps(shrink[row]));
        const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(from + 16), _mm512_set1_ps(shrink[row]));
        acc[row][step][0] = _mm512_shuffle_f32x4(low, high, 0x88);
        acc[row][step][1] = _mm512_shuffle_f32x4(low, high, 0xdd);
      }
    }
    const auto add_pair = [&](int64_t pair, __mmask32 even_seen, __mmask32 odd_seen) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int step = 0; step < kSteps; ++step) {
        const int64_t at = step * kPairStep;
        const __m512i even = _mm512_maskz_loadu_epi16(even_seen, values + now[2 * pair] + at);
        const __m512i odd = _mm512_maskz_loadu_epi16(odd_seen, values + now[2 * pair + 1] + at);
        __builtin_prefetch(values + next[2 * pair] + at, 0, 3);
        __builtin_prefetch(values + next[2 * pair + 1] + at, 0, 3);
        const __m512 low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(even, odd));
        const __m512 high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(even, odd));
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m512 share = _mm512_set1_ps(shares[row * kKeyBlock / 2 + pair]);
          acc[row][step][0] = PairSimd::fma(share, low, acc[row][step][0]);
          acc[row][step][1] = PairSimd::fma(share, high, acc[row][step][1]);
        }
      }
    };
    constexpr __mmask32 kAll = ~__mmask32{0};
    // Zeros stand for the values of keys that are not seen, at either end.
    const int64_t unseen = ahead.unseen();
    int64_t pair = unseen / 2;
    if (unseen % 2 == 1) add_pair(pair, 0, 2 * pair + 1 < count ? kAll : 0), ++pair;
    for (; pair < count / 2; ++pair) add_pair(pair, kAll, kAll);
    if (2 * pair < count) add_pair(pair, kAll, 0);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
      for (int step = 0; step < kSteps; ++step) {
        float* to = sums.acc + row * stride + d + step * kPairStep;
        const __m512i low = _mm512_castps_si512(acc[row][step][0]), high = _mm512_castps_si512(acc[row][step][1]);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, first, high));
        _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64(low, second, high));
      }
    }
  }
};

template <class T>
struct BlockType {
  using Block = T;
};

// Calls `use` with the type of block for so many tokens.
template <class F>
inline auto with_block(const Attention& a, int64_t tokens, F use) {
  if (tokens == 1) {
    switch (a.heads / a.kv_heads) {
      case 1: return use(BlockType<LoneBlock<1>>());
      case 2: return use(BlockType<LoneBlock<2>>());
      case 3: return use(BlockType<LoneBlock<3>>());
      case 4: return use(BlockType<LoneBlock<4>>());
      case 5: return use(BlockType<LoneBlock<5>>());
      case 6: return use(BlockType<LoneBlock<6>>());
      case 7: return use(BlockType<LoneBlock<7>>());
      case 8: return use(BlockType<LoneBlock<8>>());
    }
  }
  return use(BlockType<PairBlock>());
}

int64_t pair_attend_scratch(const Attention& a, int64_t tokens) {
  if (!in_pairs(a)) return avx512_kernels().attend_scratch(a, tokens);
  return with_block(a, tokens, [&](auto type) { return attend_scratch<typename decltype(type)::Block>(a, tokens); });
}

void pair_attend(const Attention& a, const QueryTile& tile, HeadRange heads, NextKeys next, float* scratch) {
  if (!in_pairs(a)) return avx512_kernels().attend(a, tile, heads, next, scratch);
  with_block(a, tile.tokens, [&](auto type) {
    attend<typename decltype(type)::Block>(a, tile, heads, next, scratch);
  });
}

void pair_attend_split(const Attention& a, const QueryTile& tile, HeadRange heads, int64_t split, NextKeys next,
                       float* partials, float* scratch) {
  if (!in_pairs(a)) return avx512_kernels().attend_split(a, tile, heads, split, next, partials, scratch);
  with_block(a, tile.tokens, [&](auto type) {
    attend_split<typename decltype(type)::Block>(a, tile, heads, split, next, partials, scratch);
  });
}

}  // namespace
}  // namespace jaxkv
