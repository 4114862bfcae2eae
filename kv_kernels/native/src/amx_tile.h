// The tile registers: their shape, and the instructions on them.
//
// The compiler's own intrinsics do not say which memory a tile is read from or stored to, so that the compiler may move
// the stores that fill it; these say it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jaxkv {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;  // 16 rows of 64 bytes

// A product's registers: the sums of two tiles of tokens times two of outputs, the outputs' weights and the tokens' x.
constexpr int kSumTile = 0, kWeightTile = 4, kXTile = 6;

struct TileSize {
  int64_t rows, row_bytes;
};

// The shapes of this thread's tiles while it stands. Released at the end, since tiles in use are saved at every switch of
// threads.
class TileShape {
 public:
  explicit TileShape(const TileSize (&sizes)[8]) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.row_bytes[tile] = static_cast<uint16_t>(sizes[tile].row_bytes);
      shape.rows[tile] = static_cast<uint8_t>(sizes[tile].rows);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~TileShape() { __asm__ volatile("tilerelease" ::); }
  TileShape(const TileShape&) = delete;
  TileShape& operator=(const TileShape&) = delete;
};

using TileMemory = char[kTileBytes];

template <int kTile>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
inline void tile_load(const void* from) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(kTile),
                   "m"(*static_cast<const TileMemory*>(from)));
}

// Rows that lie `stride` bytes apart.
template <int kTile>
inline void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
// The same of what is not read again soon, so that the first-level cache keeps other things.
template <int kTile>
inline void tile_load_once(const void* from, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void tile_store_rows(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void tile_store(void* to) {
  __asm__ volatile("tilestored %%tmm%c3, (%1,%2,1)"
                   : "=m"(*static_cast<TileMemory*>(to))
                   : "r"(to), "r"(int64_t{64}), "i"(kTile));
}

// sums [rows, 16] += x [rows, 32] times weight [32, 16]: the sum of the products of bf16, in float32.
template <int kSum, int kX, int kWeight>
inline void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kX), "i"(kWeight));
}

}  // namespace
}  // namespace jaxkv
