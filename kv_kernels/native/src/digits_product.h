// The product with quantized weights in exact integers, on vectors of bytes.
//
// A block's sums of digits times quants are exact: what they come to does not depend on how they are taken. They become
// floats once, sum = lower * place (+ highest * its place), and then acc = scale * sum + acc, acc = min * (sum of x) + acc,
// block by block.
#pragma once

#include "digits_pack.h"
#include "quant_rows.h"

namespace jaxkv {
namespace {

constexpr int64_t kDirectTokens = 4;  // of up to so many, weights are unpacked in registers
constexpr int64_t kRunVectors = 18;   // blocks whose unpacked weights stay in the first-level cache

// Scales and mins of a block of some tiles of outputs.
template <int kOutputTiles>
struct BlockScales {
  const float* scales[kOutputTiles];
  const float* mins[kOutputTiles];
};

template <int kTokens, int kOutputTiles>
using IntegerSums = __m512i[kTokens][kOutputTiles];

// One digit of every token, [tokens][32], times a block's quants.
template <WeightKind kKind, int kTokens, int kOutputTiles>
inline __attribute__((always_inline)) void add_digit(const __m512i* const* kept, const char* digits, IntegerSums<kTokens, kOutputTiles>& sums) {
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

// A block of some tokens times some tiles of outputs, of each the quants that are kept. It has to be inlined, or its sums
// would be in memory.
template <WeightKind kKind, int kDigits, int kTokens, int kOutputTiles>
inline __attribute__((always_inline)) void add_block(const __m512i* const* kept, const char* digits, const float* numbers,
                      const BlockScales<kOutputTiles>& scales, bool is_first, float* to) {
  constexpr int64_t kDigitBytes = kTokens * kQuantBlock;
  const auto number = [&](int which, int t) __attribute__((always_inline)) { return _mm512_set1_ps(numbers[which * kTokens + t]); };
  const auto begin = [&](IntegerSums<kTokens, kOutputTiles>& sums, int added) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
      for (int o = 0; o < kOutputTiles; ++o)
        sums[t][o] = quant_offset(kKind) == 0 ? _mm512_setzero_si512() : _mm512_castps_si512(number(added, t));
  };
  IntegerSums<kTokens, kOutputTiles> sums;
  __m512 highest[kTokens][kOutputTiles];
  if constexpr (kDigits == kFloatDigits) {
    begin(sums, 4);
    add_digit<kKind, kTokens, kOutputTiles>(kept, digits, sums);
    digits += kDigitBytes;
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
      for (int o = 0; o < kOutputTiles; ++o)
        highest[t][o] = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[t][o]), number(3, t));
  }
  if constexpr (kDigits == kByteDigits) {
    begin(sums, 2);
  } else {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
      for (int o = 0; o < kOutputTiles; ++o) sums[t][o] = _mm512_setzero_si512();
    add_digit<kKind, kTokens, kOutputTiles>(kept, digits, sums);
    digits += kDigitBytes;
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
      for (int o = 0; o < kOutputTiles; ++o) {
        sums[t][o] = _mm512_slli_epi32(sums[t][o], 8);
        if constexpr (quant_offset(kKind) != 0)
          sums[t][o] = _mm512_add_epi32(sums[t][o], _mm512_castps_si512(number(2, t)));
      }
    }
  }
  add_digit<kKind, kTokens, kOutputTiles>(kept, digits, sums);
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int o = 0; o < kOutputTiles; ++o) {
      const __m512 lower = _mm512_cvtepi32_ps(sums[t][o]);
      const __m512 sum = kDigits == kFloatDigits ? _mm512_fmadd_ps(lower, number(1, t), highest[t][o])
                                                 : _mm512_mul_ps(lower, number(1, t));
      float* at = to + t * kOutputBlock + o * kTileOutputs;
      __m512 acc = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(at);
      acc = _mm512_fmadd_ps(_mm512_load_ps(scales.scales[o]), sum, acc);
      if constexpr (has_mins(kKind)) acc = _mm512_fmadd_ps(_mm512_load_ps(scales.mins[o]), number(0, t), acc);
      _mm512_storeu_ps(at, acc);
    }
  }
}

// Few tokens times sixteen outputs, over all blocks.
template <WeightKind kKind, int kDigits, int kTokens>
inline void multiply_directly(const TileRows<kKind>& rows, int64_t blocks, const char* digits, const float* numbers,
                              float* results) {
  RowScales scales;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t at = block % kScaleRun;
    if (at == 0) rows.unpack_scales(block, blocks - block < kScaleRun ? blocks - block : kScaleRun, scales.scales, scales.mins);
    __m512i kept[kept_vectors(kKind)];
    rows.prefetch_ahead(block, 1);
    keep_quants(rows, block, kept);
    const __m512i* of_tile[1] = {kept};
    add_block<kKind, kDigits, kTokens, 1>(of_tile, digits, numbers, {{scales.scales[at]}, {scales.mins[at]}}, block == 0, results);
    digits += kTokens * DigitTokens<kDigits>::kTokenBlockBytes;
    numbers += kTokens * DigitTokens<kDigits>::kNumbers;
  }
}

// Sixteen outputs over a run of blocks.
struct UnpackedRun {
  alignas(64) __m512i kept[kRunVectors * kBlockVectors];
  alignas(64) float scales[kRunVectors][kTileOutputs];
  alignas(64) float mins[kRunVectors][kTileOutputs];

  template <WeightKind kKind>
  void unpack(const TileRows<kKind>& rows, int64_t first, int64_t blocks) {
    for (int64_t run = 0; run < blocks; run += kScaleRun) {
      const int64_t count = blocks - run < kScaleRun ? blocks - run : kScaleRun;
      rows.unpack_scales(first + run, count, scales + run, mins + run);
    }
    for (int64_t block = 0; block < blocks; ++block)
      keep_quants(rows, first + block, kept + block * kept_vectors(kKind));
  }
};

// A tile of tokens times one or two tiles of outputs, over a run of blocks.
template <WeightKind kKind, int kDigits, int kTokens, int kOutputTiles>
void multiply_run(const UnpackedRun* weights, bool is_first, int64_t blocks, const char* digits, const float* numbers,
                  float* results, RowsAhead& ahead, int64_t lines) {
  for (int64_t block = 0; block < blocks; ++block) {
    ahead.ask(lines);
    const __m512i* kept[kOutputTiles];
    BlockScales<kOutputTiles> scales;
#pragma GCC unroll 2
    for (int o = 0; o < kOutputTiles; ++o) {
      kept[o] = weights[o].kept + block * kept_vectors(kKind);
      scales.scales[o] = weights[o].scales[block];
      scales.mins[o] = weights[o].mins[block];
    }
    add_block<kKind, kDigits, kTokens, kOutputTiles>(kept, digits, numbers, scales, is_first && block == 0, results);
    digits += kTokens * DigitTokens<kDigits>::kTokenBlockBytes;
    numbers += kTokens * DigitTokens<kDigits>::kNumbers;
  }
}

// Calls `use` with a number of tokens, at most kMost, as a constant.
template <int64_t kMost, class F>
inline void with_tokens(int64_t tokens, F use) {
  switch (tokens) {
    case 1: return use(std::integral_constant<int, 1>());
    case 2: return use(std::integral_constant<int, 2>());
    case 3: return use(std::integral_constant<int, 3>());
    case 4: return use(std::integral_constant<int, 4>());
    case 5: if constexpr (kMost >= 5) use(std::integral_constant<int, 5>()); return;
    case 6: if constexpr (kMost >= 6) use(std::integral_constant<int, 6>()); return;
  }
}

template <WeightKind kKind, int kDigits>
void multiply_kind(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                   float* results) {
  using Tokens = DigitTokens<kDigits>;
  const Tokens shape(weight, tokens);
  const auto digits = [&](int64_t tile, int64_t block) {
    return reinterpret_cast<const char*>(packed) + shape.digits_offset(tile, block);
  };
  const auto numbers = [&](int64_t tile, int64_t block) { return packed + shape.numbers_offset(tile, block); };
  if (tokens <= kDirectTokens) {
    with_tokens<kDirectTokens>(tokens, [&](auto fixed) {
      for (int64_t output = 0; output < outputs; output += kTileOutputs)
        multiply_directly<kKind, kDigits, decltype(fixed)::value>(TileRows<kKind>(weight, first_output + output), shape.blocks,
                                                                  digits(0, 0), numbers(0, 0), results + output);
    });
    return;
  }
  UnpackedRun unpacked[2];
  const int64_t runs = (shape.blocks + kRunVectors - 1) / kRunVectors;
  for (int64_t output = 0; output < outputs; output += 2 * kTileOutputs) {
    const bool two = output + kTileOutputs < outputs;
    const TileRows<kKind> rows[2] = {{weight, first_output + output},
                                     {weight, first_output + output + (two ? kTileOutputs : 0)}};
    RowsAhead ahead = RowsAhead::of_blocks(weight, first_output + output + 2 * kTileOutputs, 2 * kTileOutputs);
    const int64_t lines = (ahead.lines() + shape.tiles * shape.blocks - 1) / (shape.tiles * shape.blocks);
    for (int64_t run = 0; run < runs; ++run) {
      const int64_t first = shape.blocks * run / runs, blocks = shape.blocks * (run + 1) / runs - first;
      for (int i = 0; i < (two ? 2 : 1); ++i) unpacked[i].unpack(rows[i], first, blocks);
      for (int64_t tile = 0; tile < shape.tiles; ++tile) {
        float* to = results + shape.first_token(tile) * kOutputBlock + output;
        with_tokens<Tokens::kMostTokens>(shape.height(tile), [&](auto fixed) {
          constexpr int kTokens = decltype(fixed)::value;
          if (two) {
            multiply_run<kKind, kDigits, kTokens, 2>(unpacked, first == 0, blocks, digits(tile, first), numbers(tile, first), to, ahead, lines);
          } else {
            multiply_run<kKind, kDigits, kTokens, 1>(unpacked, first == 0, blocks, digits(tile, first), numbers(tile, first), to, ahead, lines);
          }
        });
      }
    }
  }
}

template <int kDigits>
void digits_product(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                    float* results) {
  with_integers(weight.kind, [&](auto kind) {
    multiply_kind<decltype(kind)::value, kDigits>(weight, packed, tokens, first_output, outputs, results);
  });
}

}  // namespace
}  // namespace jaxkv
