// Some steps of k of a product in bfloat16, in the tile registers: two tiles of outputs, or one, times two of tokens, or one.
#pragma once

#include "amx_tile.h"
#include "quant_rows.h"

namespace jaxkv {
namespace {

struct Sums {
  alignas(64) float tiles[2][2][kTileRows * kTileOutputs];  // [token tile][output tile][output][token]
};

// Both tiles of tokens always: one that is not there costs nothing beside the products.
template <int kOutputTiles>
inline void begin_sums() {
  tile_zero<kSumTile>();
  tile_zero<kSumTile + 2>();
  if constexpr (kOutputTiles > 1) tile_zero<kSumTile + 1>(), tile_zero<kSumTile + 3>();
}
template <int kOutputTiles>
inline void load_sums(const Sums& sums) {
  tile_load<kSumTile>(sums.tiles[0][0]);
  tile_load<kSumTile + 2>(sums.tiles[1][0]);
  if constexpr (kOutputTiles > 1) tile_load<kSumTile + 1>(sums.tiles[0][1]), tile_load<kSumTile + 3>(sums.tiles[1][1]);
}
template <int kOutputTiles>
inline void store_sums(Sums* sums) {
  tile_store<kSumTile>(sums->tiles[0][0]);
  tile_store<kSumTile + 2>(sums->tiles[1][0]);
  if constexpr (kOutputTiles > 1) tile_store<kSumTile + 1>(sums->tiles[0][1]), tile_store<kSumTile + 3>(sums->tiles[1][1]);
}

struct Strided {
  const char* from;
  int64_t step, row;  // bytes from one step to the next, and from one row
};

// Tokens come from the second-level cache where they are many, and would drive the weights out of the first.
template <int kTokenTiles, int kOutputTiles>
inline void multiply_steps(const Strided* weights, const char* x, int64_t x_tile, int64_t x_row, int64_t steps) {
  const char *w = weights[0].from, *v = weights[1].from;
  for (int64_t step = 0; step < steps; ++step) {
    tile_load<kWeightTile>(w, weights[0].row);
    tile_load_once<kXTile>(x, x_row);
    tile_multiply<kSumTile, kWeightTile, kXTile>();
    if constexpr (kOutputTiles > 1) {
      tile_load<kWeightTile + 1>(v, weights[1].row);
      tile_multiply<kSumTile + 1, kWeightTile + 1, kXTile>();
    }
    if constexpr (kTokenTiles > 1) {
      tile_load_once<kXTile + 1>(x + x_tile, x_row);
      tile_multiply<kSumTile + 2, kWeightTile, kXTile + 1>();
      if constexpr (kOutputTiles > 1) tile_multiply<kSumTile + 3, kWeightTile + 1, kXTile + 1>();
    }
    w += weights[0].step, v += weights[1].step, x += kTileRows * x_row;
  }
}

}  // namespace
}  // namespace jaxkv
