// The product in bfloat16: x and the weights' values rounded to it, their products summed in float32 on tiles.
//
// Rows of weights are the first operand and tokens the second, so that dense rows are read as they lie. A result is
// summed over k in steps of 32 in order, however many tokens stand beside it and however k is cut in runs.
#pragma once

#include "amx_bf16_finish.h"
#include "amx_bf16_rows.h"
#include "amx_bf16_steps.h"

namespace jaxkv {
namespace {

constexpr int64_t kRunSteps = 20;  // whose weights, of two tiles of outputs, fill most of the first-level cache
constexpr int64_t kRingSteps = 4;  // of few tokens, between their unpacking and their product

// Sums of a tile of outputs as columns of the results of `tokens` tokens.
inline void to_results(const float* sums, int64_t tokens, float* results) {
  __m512i v[16];
  for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(sums + 16 * i);
  transpose(v);
  for (int64_t i = 0; i < tokens; ++i) _mm512_storeu_si512(results + i * kOutputBlock, v[i]);
}

// Sixteen outputs of a weight.
struct TileOfOutputs {
  const WeightView* weight;
  int64_t first;
};

// Two tiles of outputs, or one, times all tokens.
template <WeightKind kKind, int kOutputTiles>
class NarrowProduct {
 public:
  NarrowProduct(const TileOfOutputs (&outputs)[kOutputTiles], const NarrowTokens& tokens, const char* x)
      : outputs_(outputs), tokens_(tokens), x_(x), x_row_(4 * tokens.height),
        x_tile_(tokens.steps * kTileRows * x_row_) {
    for (int i = 0; i < kOutputTiles; ++i) rows_[i] = NarrowRows<kKind>(*outputs[i].weight, outputs[i].first);
  }

  // Calls `take(token, tokens, sums)` for every tile of tokens of the `count` there are: [output tile][output][token].
  template <class F>
  void multiply(int64_t count, F take) {
    const auto take_two = [&](int64_t first, const Sums& sums) {
      for (int64_t tile = first; tile < first + 2 && tile < tokens_.tiles; ++tile) {
        const int64_t token = tile * tokens_.height, left = count - token;
        take(token, left < tokens_.height ? left : tokens_.height, sums.tiles[tile - first]);
      }
    };
    if (tokens_.tiles <= 2) {
      Sums sums;
      multiply_few(&sums);
      take_two(0, sums);
    } else {
      multiply_many(take_two);
    }
  }

 private:
  // All sums stay in the registers, and weights are multiplied while the next are unpacked.
  void multiply_few(Sums* sums) {
    begin_sums<kOutputTiles>();
    const auto multiply = [&](int64_t first, int64_t steps, const Strided* weights) {
      if (tokens_.tiles == 2) {
        multiply_steps<2, kOutputTiles>(weights, x_at(0, first), x_tile_, x_row_, steps);
      } else {
        multiply_steps<1, kOutputTiles>(weights, x_at(0, first), x_tile_, x_row_, steps);
      }
    };
    if (lies_in_tiles()) {
      multiply(0, tokens_.steps, stored(0).tiles);
    } else {
      int64_t waiting = 0;
      unpack(0, tokens_.steps, kRingSteps, [&](int64_t step) {
        if (step > 0) multiply(step - 2, 2, unpacked(waiting).tiles);
        waiting = step % kRingSteps;
      });
      const int64_t last = (tokens_.steps - 1) / 2 * 2;
      multiply(last, tokens_.steps - last, unpacked(waiting).tiles);
    }
    store_sums<kOutputTiles>(sums);
  }

  // Some steps of all tokens at a time, whose weights stay in the first-level cache. With the last of them `take` is called
  // with the sums of two tiles of tokens after the other.
  template <class F>
  void multiply_many(F take) {
    Sums sums[kTokenBlock / (2 * kTileRows)];
    const int64_t runs = (tokens_.steps + kRunSteps - 1) / kRunSteps;
    const int64_t run = ((tokens_.steps + runs - 1) / runs + 1) / 2 * 2;
    const auto sums_of = [&](int64_t tile) { return &sums[runs == 1 ? 0 : tile / 2]; };
    for (int64_t first = 0; first < tokens_.steps; first += run) {
      const int64_t steps = tokens_.steps - first < run ? tokens_.steps - first : run;
      const bool is_last = first + steps == tokens_.steps;
      if (!lies_in_tiles()) unpack(first, steps, kRunSteps, [](int64_t) {});
      const Weights weights = lies_in_tiles() ? stored(first) : unpacked(0);
      for (int64_t tile = 0; tile < tokens_.tiles; tile += 2) {
        if (first == 0) {
          begin_sums<kOutputTiles>();
        } else {
          load_sums<kOutputTiles>(*sums_of(tile));
        }
        if (tile + 1 < tokens_.tiles) {
          multiply_steps<2, kOutputTiles>(weights.tiles, x_at(tile, first), x_tile_, x_row_, steps);
        } else {
          multiply_steps<1, kOutputTiles>(weights.tiles, x_at(tile, first), x_tile_, x_row_, steps);
        }
        store_sums<kOutputTiles>(sums_of(tile));
        if (is_last) take(tile, *sums_of(tile));
      }
    }
  }

  // Steps [first, first + steps) by twos into a ring of `ring` steps; after each two, `after(their first, from 0)`.
  template <class F>
  void unpack(int64_t first, int64_t steps, int64_t ring, F after) {
    NarrowScales scales[kOutputTiles];
    for (int64_t step = 0; step < steps; step += 2) {
      const int64_t at = step % NarrowScales::kBlocks, together = steps - step < 2 ? 1 : 2;
      for (int i = 0; i < kOutputTiles; ++i) {
        if (at == 0) rows_[i].read_scales(first + step, steps - step, &scales[i]);
        for (int64_t next = 0; next < together; ++next) rows_[i].prefetch_ahead(first + step + next, kOutputTiles);
        rows_[i].unpack(first + step, together, scales[i], at, unpacked_[i] + step % ring * kTileBytes);
      }
      after(step);
    }
  }

  struct Weights {
    Strided tiles[2];
  };
  Weights unpacked(int64_t at) const {
    Weights weights{};
    for (int i = 0; i < kOutputTiles; ++i) weights.tiles[i] = {unpacked_[i] + at * kTileBytes, kTileBytes, 64};
    return weights;
  }
  // Rows of bfloat16 are tiles as they lie, unless one would reach over the end.
  bool lies_in_tiles() const {
    if (kKind != WeightKind::kBF16) return false;
    for (const TileOfOutputs& tile : outputs_) {
      if (tile.weight->in_features % kStep != 0 || tile.first + kTileOutputs > tile.weight->out_features) return false;
    }
    return true;
  }
  Weights stored(int64_t step) const {
    Weights weights{};
    for (int i = 0; i < kOutputTiles; ++i) {
      const auto& [weight, first] = outputs_[i];
      const int64_t at = first * weight->in_features + step * kStep;
      weights.tiles[i] = {static_cast<const char*>(weight->values) + 2 * at, 2 * kStep, 2 * weight->in_features};
    }
    return weights;
  }
  const char* x_at(int64_t tile, int64_t step) const { return x_ + tile * x_tile_ + step * kTileRows * x_row_; }

  const TileOfOutputs (&outputs_)[kOutputTiles];
  const NarrowTokens& tokens_;
  const char* x_;
  int64_t x_row_, x_tile_;
  NarrowRows<kKind> rows_[kOutputTiles];
  alignas(64) char unpacked_[kOutputTiles][kRunSteps * kTileBytes];
};

// The tiles of a product of some tokens, while it stands.
class NarrowTiles {
 public:
  explicit NarrowTiles(int64_t height) : NarrowTiles({kTileRows, 4 * height}, {kTileRows, 64}) {}

 private:
  NarrowTiles(TileSize by_token, TileSize rows)
      : shape_({by_token, by_token, by_token, by_token, rows, rows, by_token, by_token}) {}
  TileShape shape_;
};

// Calls `take(output tile, token, tokens, sums of it)` for all tiles of some outputs.
template <WeightKind kKind, class F>
void for_tiles(const WeightView& weight, const NarrowTokens& shape, const char* x, int64_t tokens, int64_t first_output,
               int64_t outputs, F take) {
  for (int64_t output = 0; output < outputs; output += 2 * kTileOutputs) {
    const TileOfOutputs two[2] = {{&weight, first_output + output}, {&weight, first_output + output + kTileOutputs}};
    if (output + kTileOutputs < outputs) {
      NarrowProduct<kKind, 2>(two, shape, x).multiply(tokens, [&](int64_t token, int64_t count, const auto& sums) {
        take(output, token, count, sums[0]);
        take(output + kTileOutputs, token, count, sums[1]);
      });
    } else {
      const TileOfOutputs one[1] = {two[0]};
      NarrowProduct<kKind, 1>(one, shape, x).multiply(
          tokens, [&](int64_t token, int64_t count, const auto& sums) { take(output, token, count, sums[0]); });
    }
  }
}

template <WeightKind kKind>
void narrow_kind(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                 float* results) {
  const NarrowTokens shape(weight, tokens);
  const NarrowTiles tiles(shape.height);
  for_tiles<kKind>(weight, shape, reinterpret_cast<const char*>(packed), tokens, first_output, outputs,
                   [&](int64_t output, int64_t token, int64_t count, const float* sums) {
                     to_results(sums, count, results + token * kOutputBlock + output);
                   });
}

template <WeightKind kKind>
void finish_kind(const WeightView& weight, const WeightView* gate, const float* packed, int64_t tokens,
                 int64_t first_output, int64_t outputs, const Finish& finish) {
  const NarrowTokens shape(weight, tokens);
  const NarrowTiles tiles(shape.height);
  const char* x = reinterpret_cast<const char*>(packed);
  const auto place = [&](int64_t output, int64_t token, int64_t count) {
    return FinishedTile(finish, token, count, first_output + output, outputs - output);
  };
  if (gate == nullptr) {
    for_tiles<kKind>(weight, shape, x, tokens, first_output, outputs,
                     [&](int64_t output, int64_t token, int64_t count, const float* sums) {
                       place(output, token, count).store(sums, nullptr);
                     });
    return;
  }
  for (int64_t output = 0; output < outputs; output += kTileOutputs) {
    const TileOfOutputs both[2] = {{&weight, first_output + output}, {gate, first_output + output}};
    NarrowProduct<kKind, 2>(both, shape, x).multiply(tokens, [&](int64_t token, int64_t count, const auto& sums) {
      place(output, token, count).store(sums[0], sums[1]);
    });
  }
}

// Calls `use` with a kind as a constant.
template <class F>
void with_kind(WeightKind kind, F use) {
  switch (kind) {
#define JAXKV_KIND(name) \
  case WeightKind::name: return use(std::integral_constant<WeightKind, WeightKind::name>());
    JAXKV_KIND(kF32)
    JAXKV_KIND(kF16)
    JAXKV_KIND(kBF16)
    JAXKV_KIND(kQ8_0)
    JAXKV_KIND(kQ4_0)
    JAXKV_KIND(kQ4_1)
    JAXKV_KIND(kQ4_0Tiles)
    JAXKV_KIND(kQ4_1Tiles)
    JAXKV_KIND(kBytes)
    JAXKV_KIND(kNibbles)
    JAXKV_KIND(kFiveBits)
    JAXKV_KIND(kSixBits)
    JAXKV_KIND(kFloat8)
#undef JAXKV_KIND
  }
}

void narrow_product(const WeightView& weight, const float* packed, int64_t tokens, int64_t first_output, int64_t outputs,
                    float* results) {
  with_kind(weight.kind, [&](auto kind) {
    narrow_kind<decltype(kind)::value>(weight, packed, tokens, first_output, outputs, results);
  });
}

void narrow_finished_product(const WeightView& weight, const WeightView* gate, const float* packed, int64_t tokens,
                             int64_t first_output, int64_t outputs, const Finish& finish) {
  with_kind(weight.kind, [&](auto kind) {
    finish_kind<decltype(kind)::value>(weight, gate, packed, tokens, first_output, outputs, finish);
  });
}

}  // namespace
}  // namespace jaxkv
