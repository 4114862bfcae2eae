// Sums of a tile of tokens times some tiles of outputs over a run of blocks, on vectors of bytes.
//
// A block's sums of digits times quants are exact integers: what they come to does not depend on how they are taken. They
// become floats once. Of two or three digits: sum = lower * place (+ highest * its place), and then acc = scale * sum + acc,
// acc = min * (sum of x) + acc, block by block. Of one digit: for all of a run acc = mins * (sums of x) + acc, in pairs of
// bf16, and then acc += sum * (scale * place), two blocks at a time.
#pragma once

#include "digits_pack.h"
#include "quant_rows.h"

namespace jaxkv {
namespace {

constexpr int64_t kRunVectors = 18;  // blocks whose unpacked weights stay in the first-level cache; an even number

// Scales and mins of sixteen outputs over a run of blocks. For one digit mins are what `quant_offset` leaves of them, of two
// blocks each as a pair in the place of the first.
struct RunScales {
  alignas(64) float scales[kRunVectors][kTileOutputs];
  alignas(64) float mins[kRunVectors][kTileOutputs];

  template <WeightKind kKind, int kDigits>
  void unpack(const TileRows<kKind>& rows, int64_t first, int64_t blocks) {
    for (int64_t run = 0; run < blocks; run += kScaleRun) {
      const int64_t count = blocks - run < kScaleRun ? blocks - run : kScaleRun;
      rows.unpack_scales(first + run, count, scales + run, mins + run);
    }
    if constexpr (kDigits == kByteDigits && has_mins(kKind)) {
      const auto left = [&](int64_t block) {
        const __m512 offset = _mm512_set1_ps(quant_offset(kKind, kDigits));
        return _mm512_fmadd_ps(offset, _mm512_load_ps(scales[block]), _mm512_load_ps(mins[block]));
      };
      for (int64_t block = 0; block < blocks; block += 2) {
        const __m512 odd = block + 1 < blocks ? left(block + 1) : _mm512_setzero_ps();
        _mm512_store_si512(mins[block], paired_blocks(left(block), odd));
      }
    }
  }
};

template <int kTokens, int kOutputTiles>
using IntegerSums = __m512i[kTokens][kOutputTiles];

// One digit of every token, [tokens][32], times a block's quants.
template <WeightKind kKind, int kTokens, int kOutputTiles>
inline __attribute__((always_inline)) void add_digit(const __m512i* const* kept, const char* digits,
                                                     IntegerSums<kTokens, kOutputTiles>& sums) {
#pragma GCC unroll 8
  for (int step = 0; step < kBlockVectors; ++step) {
    const int i = step / 2 + step % 2 * 4;  // both halves of a byte one after the other
    __m512i weight[kOutputTiles];
#pragma GCC unroll 2
    for (int o = 0; o < kOutputTiles; ++o) weight[o] = unsigned_quants<kKind>(kept[o], i);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      int32_t four;
      std::memcpy(&four, digits + t * kQuantBlock + 4 * i, sizeof four);
      const __m512i of_token = _mm512_set1_epi32(four);
#pragma GCC unroll 2
      for (int o = 0; o < kOutputTiles; ++o) sums[t][o] = _mm512_dpbusd_epi32(sums[t][o], weight[o], of_token);
    }
  }
}

// A tile of tokens times some tiles of outputs: packed x from a run's first block on, what is known of the weights in that
// run, and results [tokens][kOutputBlock]. What it calls has to be inlined, or sums would be in memory.
template <WeightKind kKind, int kDigits, int kTokens, int kOutputTiles>
struct RunSums {
  using Sums = IntegerSums<kTokens, kOutputTiles>;
  const char* digits;
  const float* numbers;
  const RunScales* weights[kOutputTiles];
  float* results;

  // Results so far, or zeros; with one digit, and mins times sums of x.
  void begin(bool is_first, int64_t blocks) const {
    constexpr bool kMinsFirst = kDigits == kByteDigits && has_mins(kKind);
    if (!is_first && !kMinsFirst) return;
    __m512 acc[kTokens][kOutputTiles];
    each([&](int t, int o) { acc[t][o] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(result(t, o)); });
    if constexpr (kMinsFirst) {
      for (int64_t block = 0; block < blocks; block += 2) {
        each([&](int t, int o) __attribute__((always_inline)) {
          const auto pair = [](__m512 numbers) { return reinterpret_cast<__m512bh>(numbers); };
          acc[t][o] = _mm512_dpbf16_ps(acc[t][o], pair(_mm512_load_ps(weights[o]->mins[block])), pair(number(block, 0, t)));
        });
      }
    }
    each([&](int t, int o) { _mm512_storeu_ps(result(t, o), acc[t][o]); });
  }

  // A block, of each tile of outputs the quants that are kept.
  inline __attribute__((always_inline)) void add_block(int64_t block, const __m512i* const* kept) const {
    const char* digit = digits + block * kTokens * DigitTokens<kDigits>::kTokenBlockBytes;
    Sums sums;
    __m512 highest[kTokens][kOutputTiles];
    if constexpr (kDigits == kFloatDigits) {
      add(block, 4, digit, kept, sums);
      digit += kTokens * kQuantBlock;
      each([&](int t, int o) { highest[t][o] = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[t][o]), number(block, 3, t)); });
    }
    each([&](int t, int o) { sums[t][o] = _mm512_setzero_si512(); });
    add_digit<kKind, kTokens, kOutputTiles>(kept, digit, sums);
    digit += kTokens * kQuantBlock;
    each([&](int t, int o) {
      sums[t][o] = _mm512_slli_epi32(sums[t][o], 8);
      if constexpr (quant_offset(kKind, kDigits) != 0)
        sums[t][o] = _mm512_add_epi32(sums[t][o], _mm512_castps_si512(number(block, 2, t)));
    });
    add_digit<kKind, kTokens, kOutputTiles>(kept, digit, sums);
    each([&](int t, int o) {
      const __m512 lower = _mm512_cvtepi32_ps(sums[t][o]);
      const __m512 sum = kDigits == kFloatDigits ? _mm512_fmadd_ps(lower, number(block, 1, t), highest[t][o])
                                                 : _mm512_mul_ps(lower, number(block, 1, t));
      __m512 acc = _mm512_fmadd_ps(_mm512_load_ps(weights[o]->scales[block]), sum, _mm512_loadu_ps(result(t, o)));
      if constexpr (has_mins(kKind)) acc = _mm512_fmadd_ps(_mm512_load_ps(weights[o]->mins[block]), number(block, 0, t), acc);
      _mm512_storeu_ps(result(t, o), acc);
    });
  }

  // Two blocks of one digit, or a last one.
  template <int kBlocks>
  inline __attribute__((always_inline)) void add_bytes(int64_t first, const __m512i* const (*kept)[kOutputTiles]) const {
    __m512 parts[kTokens][kOutputTiles];
#pragma GCC unroll 2
    for (int i = 0; i < kBlocks; ++i) {
      const int64_t block = first + i;
      Sums sums;
      add(block, 2, digits + block * kTokens * kQuantBlock, kept[i], sums);
      each([&](int t, int o) {
        const __m512 scale = _mm512_mul_ps(_mm512_load_ps(weights[o]->scales[block]), number(block, 1, t));
        const __m512 sum = _mm512_cvtepi32_ps(sums[t][o]);
        parts[t][o] = i == 0 ? _mm512_mul_ps(sum, scale) : _mm512_fmadd_ps(sum, scale, parts[t][o]);
      });
    }
    each([&](int t, int o) { _mm512_storeu_ps(result(t, o), _mm512_add_ps(parts[t][o], _mm512_loadu_ps(result(t, o)))); });
  }

 private:
  template <class F>
  static inline __attribute__((always_inline)) void each(F use) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
      for (int o = 0; o < kOutputTiles; ++o) use(t, o);
  }
  float* result(int t, int o) const { return results + t * kOutputBlock + o * kTileOutputs; }
  __m512 number(int64_t block, int which, int t) const {
    return _mm512_set1_ps(numbers[(block * DigitTokens<kDigits>::kNumbers + which) * kTokens + t]);
  }
  // A digit, and an integer that takes the offset of the quants off.
  inline __attribute__((always_inline)) void add(int64_t block, int which, const char* digit, const __m512i* const* kept,
                                                 Sums& sums) const {
    each([&](int t, int o) {
      sums[t][o] = quant_offset(kKind, kDigits) == 0 ? _mm512_setzero_si512()
                                                     : _mm512_castps_si512(number(block, which, t));
    });
    add_digit<kKind, kTokens, kOutputTiles>(kept, digit, sums);
  }
};

// A run of blocks, as many together as the kind of sums takes; `keep(block, n, kept)`, n a constant, says where the quants of
// blocks [block, block + n) are, of each tile of outputs.
template <WeightKind kKind, int kDigits, int kTokens, int kOutputTiles, class F>
inline __attribute__((always_inline)) void add_run(const RunSums<kKind, kDigits, kTokens, kOutputTiles>& sums, bool is_first,
                                                   int64_t blocks, F keep) {
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  const __m512i* kept[2][kOutputTiles];
  int64_t block = 0;
  sums.begin(is_first, blocks);
  if constexpr (kDigits == kByteDigits) {
    for (; block + 2 <= blocks; block += 2) {
      keep(block, two, kept);
      sums.template add_bytes<2>(block, kept);
    }
    if (block < blocks) {
      keep(block, one, kept);
      sums.template add_bytes<1>(block, kept);
    }
  } else {
    for (; block < blocks; ++block) {
      keep(block, one, kept);
      sums.add_block(block, kept[0]);
    }
  }
}

}  // namespace
}  // namespace jaxkv
