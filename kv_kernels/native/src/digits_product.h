// The product with quantized weights in exact integers, on vectors of bytes.
#pragma once

#include "digits_sums.h"

namespace jaxkv {
namespace {

constexpr int64_t kDirectTokens = 4;  // of up to so many, weights are unpacked in registers

// A row's blocks in runs of about equal length, each of whole pairs of blocks but for the last.
struct BlockRuns {
  explicit BlockRuns(int64_t blocks_) : count((blocks_ + kRunVectors - 1) / kRunVectors), blocks(blocks_) {}
  int64_t begin(int64_t run) const { return 2 * ((blocks + 1) / 2 * run / count); }
  int64_t length(int64_t run) const { return (run + 1 < count ? begin(run + 1) : blocks) - begin(run); }
  int64_t count, blocks;
};

// Few tokens times sixteen outputs, over all blocks.
template <WeightKind kKind, int kDigits, int kTokens>
inline void multiply_directly(const TileRows<kKind>& rows, const BlockRuns& runs, const char* digits, const float* numbers,
                              float* results) {
  using Tokens = DigitTokens<kDigits>;
  RunScales scales;
  for (int64_t run = 0; run < runs.count; ++run) {
    const int64_t first = runs.begin(run);
    scales.unpack<kKind, kDigits>(rows, first, runs.length(run));
    const RunSums<kKind, kDigits, kTokens, 1> sums{digits + first * kTokens * Tokens::kTokenBlockBytes,
                                                   numbers + first * kTokens * Tokens::kNumbers, {&scales}, results};
    __m512i quants[2][kept_vectors(kKind)];
    add_run(sums, run == 0, runs.length(run), [&](int64_t block, auto count, auto* kept) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int i = 0; i < decltype(count)::value; ++i) {
        rows.prefetch_ahead(first + block + i, 1);
        keep_quants(rows, first + block + i, quants[i]);
        kept[i][0] = quants[i];
      }
    });
  }
}

// Sixteen outputs over a run of blocks.
struct UnpackedRun : RunScales {
  alignas(64) __m512i kept[kRunVectors * kBlockVectors];

  template <WeightKind kKind, int kDigits>
  void unpack(const TileRows<kKind>& rows, int64_t first, int64_t blocks) {
    RunScales::unpack<kKind, kDigits>(rows, first, blocks);
    for (int64_t block = 0; block < blocks; ++block)
      keep_quants(rows, first + block, kept + block * kept_vectors(kKind));
  }
};

// A tile of tokens times one or two tiles of outputs, over a run of blocks. It is not inlined, or too much would want
// registers.
template <WeightKind kKind, int kDigits, int kTokens, int kOutputTiles>
__attribute__((noinline)) void multiply_run(const UnpackedRun* weights, bool is_first, int64_t blocks, const char* digits, const float* numbers,
                  float* results, RowsAhead& ahead, int64_t lines) {
  RunSums<kKind, kDigits, kTokens, kOutputTiles> sums{digits, numbers, {}, results};
  for (int o = 0; o < kOutputTiles; ++o) sums.weights[o] = &weights[o];
  add_run(sums, is_first, blocks, [&](int64_t block, auto count, auto* kept) __attribute__((always_inline)) {
    constexpr int kCount = decltype(count)::value;
    ahead.ask(kCount * lines);
#pragma GCC unroll 2
    for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 2
      for (int o = 0; o < kOutputTiles; ++o) kept[i][o] = weights[o].kept + (block + i) * kept_vectors(kKind);
  });
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
  const BlockRuns runs(shape.blocks);
  if (tokens <= kDirectTokens) {
    with_tokens<kDirectTokens>(tokens, [&](auto fixed) {
      for (int64_t output = 0; output < outputs; output += kTileOutputs)
        multiply_directly<kKind, kDigits, decltype(fixed)::value>(TileRows<kKind>(weight, first_output + output), runs,
                                                                  digits(0, 0), numbers(0, 0), results + output);
    });
    return;
  }
  UnpackedRun unpacked[2];
  for (int64_t output = 0; output < outputs; output += 2 * kTileOutputs) {
    const bool two = output + kTileOutputs < outputs;
    const TileRows<kKind> rows[2] = {{weight, first_output + output},
                                     {weight, first_output + output + (two ? kTileOutputs : 0)}};
    RowsAhead ahead = RowsAhead::of_blocks(weight, first_output + output + 2 * kTileOutputs, 2 * kTileOutputs);
    const int64_t lines = (ahead.lines() + shape.tiles * shape.blocks - 1) / (shape.tiles * shape.blocks);
    for (int64_t run = 0; run < runs.count; ++run) {
      const int64_t first = runs.begin(run), blocks = runs.length(run);
      for (int i = 0; i < (two ? 2 : 1); ++i) unpacked[i].template unpack<kKind, kDigits>(rows[i], first, blocks);
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
