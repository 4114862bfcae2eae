// Attention of bfloat16 queries over bfloat16 pools: scores and weighed values on tiles, the softmax in float32.
//
// Keys are read as they lie, as rows of the first operand, so that scores come out as [key][row]. Few rows are turned and
// go on as rows; this is what is here. Many stay columns: `TallBlock`. A block's weights are rounded to bfloat16 where they
// meet the values; their sum is taken before.
#pragma once

#include <cstring>

#include "bf16_functions.h"
#include "amx_tile.h"
#include "bf16_rows.h"
#include "attention_kernel.h"
#include "simd_avx512.h"

namespace jaxkv {
namespace {

constexpr int64_t kDimStep = 32;  // of head_dim, or of keys: what one tile takes

// Registers: scores of two tiles of keys, keys, queries, results of two tiles of dimensions, weights, values.
constexpr int kScoreTile = 0, kKeyTile = 2, kQueryTile = 3, kOutTile = 4, kShareTile = 6, kValueTile = 7;

inline bool is_narrow(const Attention& a) {
  return a.q_type == Element::kBF16 && a.pool_type == Element::kBF16 && a.head_dim % kDimStep == 0;
}

struct NarrowBlock : SoftmaxScratch<Avx512Simd> {
  using Simd = Avx512Simd;
  using Ahead = KeysAhead;
  int64_t tiles, height;  // of query rows
  uint16_t *keys;         // [kKeyBlock][head_dim]
  char *values;           // [key steps][dim tiles][16 pairs of keys][16] pairs of bf16
  float *queries;         // [tiles][dim steps][16 pairs of dims][height] of pairs of bf16
  float *query;           // [tile rows][head_dim]
  char *shares;           // [key steps][tile rows][32] bf16
  float *turned;          // [kKeyBlock][16], or [tile rows][head_dim]
  uint16_t *zeros;        // [head_dim]

  NarrowBlock(const Attention& a, int64_t tokens, float* memory) : SoftmaxScratch<Avx512Simd>(a, tokens, memory) {
    tiles = (rows + kTileRows - 1) / kTileRows;
    height = ((rows + tiles - 1) / tiles + 3) / 4 * 4;
    keys = reinterpret_cast<uint16_t*>(take(kKeyBlock * a.head_dim / 2));
    values = reinterpret_cast<char*>(take(kKeyBlock * a.head_dim / 2));
    queries = take(tiles * height * a.head_dim / 2);
    query = take(kTileRows * a.head_dim);
    shares = reinterpret_cast<char*>(take(kKeyBlock / kDimStep * kTileBytes / 4));
    turned = take(kTileRows * (kKeyBlock > a.head_dim ? kKeyBlock : a.head_dim));
    zeros = reinterpret_cast<uint16_t*>(take(a.head_dim / 2));
  }

  void begin(const Attention& a, const QueryTile& tile, int64_t kv_head) const {
    std::memset(zeros, 0, static_cast<size_t>(a.head_dim) * 2);
    float* to = queries;
    for (int64_t first = 0; first < tiles * height; first += height) {
      for (int64_t i = 0; i < height; ++i) {
        float* row = query + i * a.head_dim;
        if (first + i < rows) {
          load_query<Avx512Simd>(a, tile, kv_head, first + i, a.head_dim, row);
        } else {
          std::memset(row, 0, static_cast<size_t>(a.head_dim) * 4);
        }
      }
      for (int64_t d = 0; d < a.head_dim; d += kDimStep, to += kTileRows * height)
        pack_columns(query + d, a.head_dim, height, kDimStep, 16, height, to);
    }
  }

  void score(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count,
             int64_t padded, KeysAhead& ahead) const {
    load(a, tile, kv_head, first, count, padded, ahead);
    const int64_t steps = a.head_dim / kDimStep, query_bytes = kTileRows * height * 4;
    for (int64_t t = 0; t < tiles; ++t) {
      for (int64_t key = 0; key < padded; key += 2 * kTileRows) {
        const bool two = key + kTileRows < padded;
        tile_zero<kScoreTile>();
        tile_zero<kScoreTile + 1>();
        for (int64_t step = 0; step < steps; ++step) {
          ahead.ask(3);
          tile_load<kQueryTile>(reinterpret_cast<const char*>(queries) + (t * steps + step) * query_bytes, 4 * height);
          const uint16_t* from = keys + key * a.head_dim + step * kDimStep;
          tile_load<kKeyTile>(from, 2 * a.head_dim);
          tile_multiply<kScoreTile, kKeyTile, kQueryTile>();
          if (!two) continue;
          tile_load<kKeyTile>(from + kTileRows * a.head_dim, 2 * a.head_dim);
          tile_multiply<kScoreTile + 1, kKeyTile, kQueryTile>();
        }
        tile_store<kScoreTile>(turned);
        if (two) tile_store<kScoreTile + 1>(turned + kTileRows * 16);
        for (int64_t half = 0; half < (two ? 2 : 1); ++half) {
          __m512i v[16];
          ahead.ask(3);
          for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(turned + (half * kTileRows + i) * 16);
          transpose(v);
          for (int64_t i = 0; i < height && t * height + i < rows; ++i)
            _mm512_storeu_si512(scores + (t * height + i) * kKeyBlock + key + half * kTileRows, v[i]);
        }
      }
    }
  }

  template <class F>
  void soften(const Attention& a, const SoftmaxSums<Avx512Simd>& sums, int64_t padded, KeysAhead& ahead,
              F visible_to) const {
    softmax_rows<Avx512Simd>(a, *this, sums, padded, ahead, visible_to, quick_exp);
  }
  void begin_split(const SoftmaxSums<Avx512Simd>& sums) const { sums.clear(); }
  void finish_split(const SoftmaxSums<Avx512Simd>&) const {}

  void weigh(const Attention&, int64_t, int64_t count, const SoftmaxSums<Avx512Simd>& sums, KeysAhead& ahead) const {
    const int64_t steps = (count + kDimStep - 1) / kDimStep, dim_tiles = stride / 16;
    const int64_t padded = (count + 15) / 16 * 16;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = t * height, present = rows - first < height ? rows - first : height;
      for (int64_t step = 0; step < steps; ++step) {
        const bool whole = step * kDimStep + 16 < padded;
        for (int64_t i = 0; i < height; ++i) {
          const float* from = scores + (first + i) * kKeyBlock + step * kDimStep;
          const __m512 low = i < present ? _mm512_loadu_ps(from) : _mm512_setzero_ps();
          const __m512 high = i < present && whole ? _mm512_loadu_ps(from + 16) : _mm512_setzero_ps();
          _mm512_store_si512(shares + step * kTileBytes + i * 64, narrowed(low, high));
        }
      }
      for (int64_t dim = 0; dim < dim_tiles; dim += 2) {  // head_dim is a multiple of two tiles
        tile_zero<kOutTile>();
        tile_zero<kOutTile + 1>();
        for (int64_t step = 0; step < steps; ++step) {
          ahead.ask(4);
          tile_load<kShareTile>(shares + step * kTileBytes);
          tile_load<kValueTile>(values + (step * dim_tiles + dim) * kTileBytes);
          tile_multiply<kOutTile, kShareTile, kValueTile>();
          tile_load<kValueTile>(values + (step * dim_tiles + dim + 1) * kTileBytes);
          tile_multiply<kOutTile + 1, kShareTile, kValueTile>();
        }
        tile_store_rows<kOutTile>(turned + dim * 16, 4 * stride);
        tile_store_rows<kOutTile + 1>(turned + (dim + 1) * 16, 4 * stride);
      }
      for (int64_t i = 0; i < present; ++i) {
        ahead.ask(3);
        const __m512 kept = _mm512_set1_ps(shrink[first + i]);
        float* acc = sums.acc + (first + i) * stride;
        for (int64_t d = 0; d < stride; d += 16)
          _mm512_storeu_ps(acc + d, _mm512_fmadd_ps(_mm512_loadu_ps(acc + d), kept, _mm512_load_ps(turned + i * stride + d)));
      }
    }
  }

 protected:
  // `count` keys as rows and their values as pairs of rows, zeros after them and for pages that were given back.
  void load(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count,
            int64_t padded, KeysAhead& ahead) const {
    const uint16_t* value_rows[kKeyBlock];
    const int64_t oldest = tile.oldest_key(a.window) - first, unseen = oldest < 0 ? 0 : oldest < count ? oldest : count;
    const size_t row_bytes = static_cast<size_t>(a.head_dim) * 2;
    std::memset(keys, 0, static_cast<size_t>(unseen) * row_bytes);
    std::memset(keys + count * a.head_dim, 0, static_cast<size_t>(padded - count) * row_bytes);
    for (int64_t i = 0; i < kKeyBlock; ++i)
      if (i < unseen || i >= count) value_rows[i] = zeros;
    int64_t key = unseen;
    for_pages(a, tile, first + unseen, first + count, [&](int64_t slot, int64_t number) {
      for (int64_t i = slot; i < slot + number; ++i, ++key) {
        const int64_t at = (i * a.kv_heads + kv_head) * a.head_dim;
        for (int64_t d = 0; d < a.head_dim; d += kDimStep)
          _mm512_storeu_si512(keys + key * a.head_dim + d, _mm512_loadu_si512(static_cast<const uint16_t*>(a.k) + at + d));
        value_rows[key] = static_cast<const uint16_t*>(a.v) + at;
        if (key % 2 == 0) ahead.ask(1);
      }
    });
    const int64_t steps = (count + kDimStep - 1) / kDimStep;
    const __m512i left = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), right = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    char* to = values;
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t d = 0; d < a.head_dim; d += kDimStep, to += 2 * kTileBytes) {
        for (int64_t pair = 0; pair < kTileRows; ++pair) {
          const uint16_t* const* two = value_rows + step * kDimStep + 2 * pair;
          const __m512i even = _mm512_loadu_si512(two[0] + d), odd = _mm512_loadu_si512(two[1] + d);
          const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
          _mm512_store_si512(to + pair * 64, _mm512_permutex2var_epi64(low, left, high));
          _mm512_store_si512(to + kTileBytes + pair * 64, _mm512_permutex2var_epi64(low, right, high));
          if (pair % 2 == 0) ahead.ask(1);
        }
      }
    }
  }
};

// Tiles of `height` query rows: columns of scores and queries, rows of weights and results.
TileShape narrow_shape(int64_t height) {
  const TileSize columns{16, 4 * height}, whole{16, 64}, by_row{height, 64};
  return TileShape({columns, columns, whole, columns, by_row, by_row, by_row, whole});
}

}  // namespace
}  // namespace jaxkv
