// The same for many query rows, which stay columns: what is done for every key is then done for sixteen rows at once, and
// nothing is summed across a vector. Weights of values are added in the same order as for few rows: the bits are the same.
#pragma once

#include "amx_attention.h"

namespace jaxkv {
namespace {

// Registers: sums of four tiles of keys or of dimensions, columns that they are multiplied by, and two of their rows.
constexpr int kColumnsTile = 4, kRowsTile = 6;
constexpr int64_t kSumTiles = 4;

// Sums of up to four tiles of rows [16][32], the rows `row_bytes` apart, times columns [16 pairs], over `steps`.
template <class RowsAt, class ColumnsAt>
inline void multiply_rows(int64_t row_tiles, int64_t steps, int64_t row_bytes, RowsAt rows_at, int64_t column_bytes,
                          ColumnsAt columns_at) {
  tile_zero<kScoreTile>();
  tile_zero<kScoreTile + 1>();
  tile_zero<kScoreTile + 2>();
  tile_zero<kScoreTile + 3>();
  for (int64_t step = 0; step < steps; ++step) {
    tile_load<kColumnsTile>(columns_at(step), column_bytes);
    tile_load<kRowsTile>(rows_at(step, 0), row_bytes);
    tile_multiply<kScoreTile, kRowsTile, kColumnsTile>();
    if (row_tiles < 2) continue;
    tile_load<kRowsTile + 1>(rows_at(step, 1), row_bytes);
    tile_multiply<kScoreTile + 1, kRowsTile + 1, kColumnsTile>();
    if (row_tiles < 3) continue;
    tile_load<kRowsTile>(rows_at(step, 2), row_bytes);
    tile_multiply<kScoreTile + 2, kRowsTile, kColumnsTile>();
    if (row_tiles < 4) continue;
    tile_load<kRowsTile + 1>(rows_at(step, 3), row_bytes);
    tile_multiply<kScoreTile + 3, kRowsTile + 1, kColumnsTile>();
  }
}

// Those sums, [row_tiles][16][16].
inline void store_rows(int64_t row_tiles, float* to) {
  tile_store_rows<kScoreTile>(to, 64);
  if (row_tiles > 1) tile_store_rows<kScoreTile + 1>(to + 256, 64);
  if (row_tiles > 2) tile_store_rows<kScoreTile + 2>(to + 512, 64);
  if (row_tiles > 3) tile_store_rows<kScoreTile + 3>(to + 768, 64);
}

struct TallBlock : NarrowBlock {
  float *columns;   // scores, then weights: [tiles][kKeyBlock][16 rows]
  char *dims;       // values: [key steps][dim tiles][16 dims][32 keys] bf16
  char *pairs;      // weights of one tile of rows: [key steps][16 pairs of keys][16 rows] of pairs of bf16
  float *by_dim;    // the weighted sums of a split: [tiles][head_dim][16 rows]

  TallBlock(const Attention& a, int64_t tokens, float* memory) : NarrowBlock(a, tokens, memory) {
    columns = take(tiles * kKeyBlock * 16);
    dims = reinterpret_cast<char*>(take(kKeyBlock * a.head_dim / 2));
    pairs = reinterpret_cast<char*>(take(kKeyBlock / kDimStep * kTileBytes / 4));
    by_dim = take(tiles * a.head_dim * 16);
  }

  void begin_split(const SoftmaxSums<Avx512Simd>& sums) const {
    sums.clear();
    std::memset(by_dim, 0, static_cast<size_t>(tiles * stride * 16) * sizeof(float));
  }

  void finish_split(const SoftmaxSums<Avx512Simd>& sums) const {
    for (int64_t t = 0; t < tiles; ++t) {
      for (int64_t d = 0; d < stride; d += 16) {
        __m512i v[16];
        for (int64_t i = 0; i < 16; ++i) v[i] = _mm512_load_si512(by_dim + (t * stride + d + i) * 16);
        transpose(v);
        for (int64_t i = 0; i < height && t * height + i < rows; ++i)
          _mm512_storeu_si512(sums.acc + (t * height + i) * stride + d, v[i]);
      }
    }
  }

  void score(const Attention& a, const QueryTile& tile, int64_t kv_head, int64_t first, int64_t count, int64_t padded,
             KeysAhead& ahead) const {
    load(a, tile, kv_head, first, count, padded, ahead);
    const int64_t steps = a.head_dim / kDimStep, query_floats = kTileRows * height, key_tiles = padded / kTileRows;
    static_assert(kKeyBlock == kSumTiles * kTileRows);
    for (int64_t t = 0; t < tiles; ++t) {
      multiply_rows(
          key_tiles, steps, 2 * a.head_dim,
          [&](int64_t step, int64_t i) { return keys + i * kTileRows * a.head_dim + step * kDimStep; }, 4 * height,
          [&](int64_t step) { return queries + (t * steps + step) * query_floats; });
      store_rows(key_tiles, columns + t * kKeyBlock * 16);
    }
    const int64_t value_tiles = (count + kDimStep - 1) / kDimStep * (stride / 16);
    for (int64_t i = 0; i < value_tiles; ++i) {
      __m512i v[16];
      for (int64_t pair = 0; pair < 16; ++pair) v[pair] = _mm512_load_si512(values + i * kTileBytes + pair * 64);
      transpose(v);
      for (int64_t dim = 0; dim < 16; ++dim) _mm512_store_si512(dims + i * kTileBytes + dim * 64, v[dim]);
    }
  }

  template <class F>
  void soften(const Attention& a, const SoftmaxSums<Avx512Simd>& sums, int64_t padded, KeysAhead&, F visible_to) const {
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = t * height, present = rows - first < height ? rows - first : height;
      hide(a, t, padded, visible_to);
      const float* column = columns + t * kKeyBlock * 16;
      __m512 most[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) most[i] = _mm512_load_ps(column + i * 16);
      for (int64_t key = 4; key < padded; key += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) most[i] = _mm512_max_ps(_mm512_load_ps(column + (key + i) * 16), most[i]);
      }
      const __m512 highest = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
      const auto lanes = static_cast<__mmask16>((1 << present) - 1);
      const __m512 minus_infinity = _mm512_set1_ps(kMinusInfinity);
      const __m512 before = _mm512_mask_loadu_ps(minus_infinity, lanes, sums.best + first);
      const __m512 best = _mm512_mask_mov_ps(before, _mm512_cmp_ps_mask(highest, before, _CMP_GT_OQ), highest);
      const __m512 offset = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(best, minus_infinity, _CMP_NEQ_UQ), best);
      const __m512 shrunk = quick_exp(_mm512_sub_ps(before, offset));
      const __m512 total = _mm512_maskz_loadu_ps(lanes, sums.total + first);
      const __m512 more = weigh_column(columns + t * kKeyBlock * 16, padded, offset);
      _mm512_mask_storeu_ps(sums.best + first, lanes, best);
      _mm512_mask_storeu_ps(shrink + first, lanes, shrunk);
      _mm512_mask_storeu_ps(sums.total + first, lanes, _mm512_fmadd_ps(total, shrunk, more));
    }
  }

  void weigh(const Attention&, int64_t, int64_t count, const SoftmaxSums<Avx512Simd>&, KeysAhead&) const {
    const int64_t steps = (count + kDimStep - 1) / kDimStep, dim_tiles = stride / 16;
    for (int64_t t = 0; t < tiles; ++t) {
      pair_column(t, (count + 15) / 16 * 16, steps);
      for (int64_t dim = 0; dim < dim_tiles; dim += kSumTiles) {
        const int64_t together = dim_tiles - dim < kSumTiles ? dim_tiles - dim : kSumTiles;
        multiply_rows(
            together, steps, 64,
            [&](int64_t step, int64_t i) { return dims + (step * dim_tiles + dim + i) * kTileBytes; }, 64,
            [&](int64_t step) { return pairs + step * kTileBytes; });
        store_rows(together, turned + dim * 256);
      }
      add_turned(t);
    }
  }

 private:
  // Scores of a tile's rows, capped, and minus infinity for keys that a row does not see. What stands for rows that are
  // not there is of no use.
  template <class F>
  void hide(const Attention& a, int64_t t, int64_t padded, F visible_to) const {
    float* column = columns + t * kKeyBlock * 16;
    if (a.soft_cap > 0) {
      for (int64_t i = 0; i < padded * 16; i += 16)
        _mm512_store_ps(column + i, capped<Avx512Simd>(_mm512_load_ps(column + i), a.soft_cap));
    }
    const int64_t first = t * height, last = (rows - first < height ? rows : first + height) - 1;
    if (visible_to(first).high >= padded && visible_to(last).low <= 0) return;  // later rows see later keys
    alignas(64) int32_t low[16] = {}, high[16] = {};
    for (int64_t row = first; row <= last; ++row) {
      const Visible visible = visible_to(row);
      low[row - first] = static_cast<int32_t>(visible.low < 0 ? 0 : visible.low);
      high[row - first] = static_cast<int32_t>(visible.high < padded ? visible.high : padded);
    }
    const __m512i from = _mm512_load_si512(low), to = _mm512_load_si512(high);
    for (int64_t key = 0; key < padded; ++key) {
      const __m512i at = _mm512_set1_epi32(static_cast<int32_t>(key));
      const __mmask16 seen = _mm512_cmple_epi32_mask(from, at) & _mm512_cmplt_epi32_mask(at, to);
      float* scores_of_key = column + key * 16;
      _mm512_store_ps(scores_of_key,
                      _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), seen, _mm512_load_ps(scores_of_key)));
    }
  }

  // Scores to weights; their sum, added up as across a vector: every sixteenth, then halves, as few rows do it.
  static __m512 weigh_column(float* column, int64_t padded, __m512 offset) {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
    for (int64_t key = 0; key < padded; key += 16) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        float* at = column + (key + i) * 16;
        const __m512 weight = quick_exp(_mm512_sub_ps(_mm512_load_ps(at), offset));
        _mm512_store_ps(at, weight);
        sums[i] = _mm512_add_ps(sums[i], weight);
      }
    }
#pragma GCC unroll 4
    for (int width = 8; width > 0; width /= 2)
#pragma GCC unroll 8
      for (int i = 0; i < width; ++i) sums[i] = _mm512_add_ps(sums[i], sums[i + width]);
    return sums[0];
  }

  // Weights in pairs of keys, zeros after the last.
  void pair_column(int64_t t, int64_t padded, int64_t steps) const {
    for (int64_t pair = 0; pair < steps * kTileRows; ++pair) {
      const float* two = columns + (t * kKeyBlock + 2 * pair) * 16;
      const __m512i both = 2 * pair < padded ? narrowed_pairs(_mm512_load_ps(two), _mm512_load_ps(two + 16))
                                             : _mm512_setzero_si512();
      _mm512_store_si512(pairs + pair * 64, both);
    }
  }

  // The sums of a tile's rows, shrunk, and what the values of a block add to them.
  void add_turned(int64_t t) const {
    const int64_t first = t * height, present = rows - first < height ? rows - first : height;
    const __m512 kept = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << present) - 1), shrink + first);
    float* sums = by_dim + t * stride * 16;
    for (int64_t i = 0; i < stride * 16; i += 16)
      _mm512_store_ps(sums + i, _mm512_fmadd_ps(_mm512_load_ps(sums + i), kept, _mm512_load_ps(turned + i)));
  }
};

TileShape tall_shape(int64_t height) {
  const TileSize columns{16, 4 * height}, rows{16, 64};
  return TileShape({columns, columns, columns, columns, columns, columns, rows, rows});
}

// Calls `use` with a null pointer to the block that so many tokens are best taken in, its tiles shaped.
template <class F>
void with_block(const Attention& a, int64_t tokens, float* scratch, F use) {
  const NarrowBlock rows(a, tokens, scratch);
  if (rows.tiles > 1) {
    const TileShape shape = tall_shape(rows.height);
    use(static_cast<TallBlock*>(nullptr));
  } else {
    const TileShape shape = narrow_shape(rows.height);
    use(static_cast<NarrowBlock*>(nullptr));
  }
}

int64_t narrow_attend_scratch(const Attention& a, int64_t tokens) {
  if (!is_narrow(a)) return avx512_kernels().attend_scratch(a, tokens);
  return attend_scratch<TallBlock>(a, tokens);
}

void narrow_attend(const Attention& a, const QueryTile& tile, HeadRange heads, NextKeys next, float* scratch) {
  if (!is_narrow(a)) return avx512_kernels().attend(a, tile, heads, next, scratch);
  with_block(a, tile.tokens, scratch, [&](auto* block) {
    attend<std::remove_pointer_t<decltype(block)>>(a, tile, heads, next, scratch);
  });
}

void narrow_attend_split(const Attention& a, const QueryTile& tile, HeadRange heads, int64_t split, NextKeys next,
                         float* partials, float* scratch) {
  if (!is_narrow(a)) return avx512_kernels().attend_split(a, tile, heads, split, next, partials, scratch);
  with_block(a, tile.tokens, scratch, [&](auto* block) {
    attend_split<std::remove_pointer_t<decltype(block)>>(a, tile, heads, split, next, partials, scratch);
  });
}

}  // namespace
}  // namespace jaxkv
