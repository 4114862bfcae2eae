// What the product in bfloat16 multiplies: tokens, packed as columns of pairs, and weights, sixteen rows unpacked at a time.
#pragma once

#include <type_traits>

#include "amx_tile.h"
#include "bf16_rows.h"
#include "quant_rows.h"
#include "simd_avx512.h"
#include "weight_rows.h"

namespace jaxkv {
namespace {

constexpr int64_t kStep = 32;  // of k: what one tile takes

constexpr bool has_nibbles(WeightKind kind) {
  return has_integers(kind) && kind != WeightKind::kQ8_0;
}

// Tokens are cut in tiles of one height. Packed x is [tiles][steps][16 pairs of k][height] of pairs of bf16. A step has
// 32 numbers that follow each other; but of weights of four bits, two steps have the first and the second half of each
// of two blocks, which is how their quants lie.
struct NarrowTokens {
  NarrowTokens(const WeightView& weight, int64_t tokens) {
    tiles = (tokens + kTileRows - 1) / kTileRows;
    const int64_t even = (tokens + tiles - 1) / tiles;
    height = even == 1 ? 1 : (even + 3) / 4 * 4;
    paired = has_nibbles(weight.kind);
    steps = (weight.in_features + kStep - 1) / kStep;
    if (paired) steps = (steps + 1) / 2 * 2;
  }
  int64_t floats() const { return tiles * steps * kTileRows * height; }
  int64_t tiles, height, steps;
  bool paired;
};

int64_t narrow_packed_size(const WeightView& weight, int64_t tokens) { return NarrowTokens(weight, tokens).floats(); }

// `rows(first, count)` are those of some tokens.
template <class Rows>
inline void pack_tokens(const WeightView& weight, Rows rows, int64_t tokens, Part part, float* packed) {
  const NarrowTokens shape(weight, tokens);
  for (int64_t tile = part.begin(shape.tiles); tile < part.end(shape.tiles); ++tile) {
    float* to = packed + tile * shape.steps * kTileRows * shape.height;
    const int64_t first = tile * shape.height, present = tokens - first < shape.height ? tokens - first : shape.height;
    const auto* from = rows(first, present);
    for (int64_t step = 0; step < shape.steps; ++step, to += kTileRows * shape.height) {
      const int64_t at = shape.paired ? step / 2 * 2 * kStep + step % 2 * 16 : step * kStep;
      pack_columns(from + at, weight.in_features, present, weight.in_features - at, shape.paired ? kStep : 16,
                   shape.height, to);
    }
  }
}

void narrow_pack(const WeightView& weight, const TokenRows& x, int64_t tokens, Part part, float* packed) {
  pack_tokens(weight, x, tokens, part, packed);
}

void narrow_pack_narrow(const WeightView& weight, const void* x, int64_t tokens, Part part, float* packed) {
  const auto rows = [&](int64_t first, int64_t) { return static_cast<const uint16_t*>(x) + first * weight.in_features; };
  pack_tokens(weight, rows, tokens, part, packed);
}

// Values 4-bit quants stand for in two blocks of one row: a table for each, made by one multiplication.
inline void narrow_nibbles(__m256i quants, __m512 scale, __m512 min, __m512 next_scale, __m512 next_min,
                           __m512i* low, __m512i* high) {
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i table = narrowed(_mm512_fmadd_ps(scale, numbers, min), _mm512_fmadd_ps(next_scale, numbers, next_min));
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  const __m512i bytes = _mm512_cvtepu8_epi16(quants);
  constexpr int kAndOr = 0xea;  // (a & b) | c
  *low = _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(bytes, _mm512_set1_epi16(15), second, kAndOr), table);
  *high = _mm512_permutexvar_epi16(_mm512_or_si512(_mm512_srli_epi16(bytes, 4), second), table);
}

// Scales and mins of sixteen rows, of as many blocks as are read together.
struct NarrowScales {
  static constexpr int64_t kBlocks = 16;
  alignas(64) float scales[kBlocks][kTileOutputs];
  alignas(64) float mins[kBlocks][kTileOutputs];
};

// Sixteen rows of a weight, from `first_output` on, as tiles [16 rows][32] of bf16.
template <WeightKind kKind>
class NarrowRows {
 public:
  NarrowRows() = default;
  NarrowRows(const WeightView& weight, int64_t first_output) : weight_(&weight), first_output_(first_output) {
    if constexpr (has_integers(kKind)) rows_ = TileRows<kKind>(weight, first_output);
  }

  // Of steps [first, first + steps), or as many of them as there is room for.
  void read_scales(int64_t first, int64_t steps, NarrowScales* to) const {
    const int64_t left = weight_->in_features / kQuantBlock - first, most = steps < left ? steps : left;
    const int64_t blocks = most < NarrowScales::kBlocks ? most : NarrowScales::kBlocks;
    if constexpr (has_integers(kKind)) {
      for (int64_t run = 0; run < blocks; run += kScaleRun) {
        const int64_t count = blocks - run < kScaleRun ? blocks - run : kScaleRun;
        rows_.unpack_scales(first + run, count, to->scales + run, to->mins + run);
      }
    }
  }
  void prefetch_ahead(int64_t step, int64_t tiles) const {
    if constexpr (has_integers(kKind)) rows_.prefetch_ahead(step, tiles);
  }
  // One step or two from `step` on, whose scales begin at `at`.
  void unpack(int64_t step, int64_t steps, const NarrowScales& scales, int64_t at, char* tiles) const {
    if constexpr (has_nibbles(kKind)) {
      unpack_nibbles(step, scales, at, tiles);
    } else if constexpr (kKind == WeightKind::kQ8_0) {
      for (int64_t i = 0; i < steps; ++i) unpack_bytes(step + i, scales, at + i, tiles + i * kTileBytes);
    } else {
      unpack_any(step, steps, tiles);
    }
  }

 private:
  void unpack_nibbles(int64_t block, const NarrowScales& scales, int64_t at, char* tiles) const {
    const bool single = (block + 1) * kQuantBlock == weight_->in_features;  // the second is met by zeros of x
    const int64_t next = single ? at : at + 1, beyond = single ? 0 : TileRows<kKind>::kBlockStride;
    for (int64_t i = 0; i < kTileOutputs; ++i) {
      const __m512 scale = _mm512_set1_ps(scales.scales[at][i]), next_scale = _mm512_set1_ps(scales.scales[next][i]);
      __m512 min, next_min;
      if constexpr (has_mins(kKind)) {
        min = _mm512_set1_ps(scales.mins[at][i]), next_min = _mm512_set1_ps(scales.mins[next][i]);
      } else {
        min = _mm512_mul_ps(scale, _mm512_set1_ps(-8)), next_min = _mm512_mul_ps(next_scale, _mm512_set1_ps(-8));
      }
      const uint8_t* quants = rows_.quants(i, block);
      const __m256i two = _mm256_set_m128i(load_16_bytes(quants + beyond), load_16_bytes(quants));
      __m512i low, high;
      narrow_nibbles(two, scale, min, next_scale, next_min, &low, &high);
      _mm512_store_si512(tiles + i * 64, low);
      _mm512_store_si512(tiles + kTileBytes + i * 64, high);
    }
  }
  void unpack_bytes(int64_t block, const NarrowScales& scales, int64_t at, char* tile) const {
    for (int64_t i = 0; i < kTileOutputs; ++i) {
      const __m512 scale = _mm512_set1_ps(scales.scales[at][i]);
      const uint8_t* quants = rows_.quants(i, block);
      const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16_bytes(quants)));
      const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16_bytes(quants + 16)));
      _mm512_store_si512(tile + i * 64, narrowed(_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale)));
    }
  }
  void unpack_any(int64_t first, int64_t steps, char* tiles) const {
    const int64_t left = weight_->in_features - first * kStep, count = left < steps * kStep ? left : steps * kStep;
    with_rows<Avx512Simd>(kKind, [&](auto* type) {
      using Rows = std::remove_pointer_t<decltype(type)>;
      alignas(64) float row[2 * kStep];
      for (int64_t i = 0; i < kTileOutputs; i += kRowGroup) {
        const Rows rows(*weight_, first_output_ + i, first * kStep, count);
        for (int64_t n = 0; n < kRowGroup; ++n) {
          unpack_panel_row<Avx512Simd>(rows, n, row);
          for (int64_t k = (count + 15) / 16 * 16; k < steps * kStep; ++k) row[k] = 0;
          for (int64_t step = 0; step < steps; ++step)
            _mm512_store_si512(tiles + step * kTileBytes + (i + n) * 64,
                               narrowed(_mm512_load_ps(row + step * kStep), _mm512_load_ps(row + step * kStep + 16)));
        }
      }
    });
  }

  const WeightView* weight_;
  int64_t first_output_;
  TileRows<kKind> rows_;
};

}  // namespace
}  // namespace jaxkv
