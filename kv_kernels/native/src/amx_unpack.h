// Sixteen outputs of a quantized weight over a block of 32 elements, as a tile of bf16, in which every quant is exact.
#pragma once

#include "amx_tile.h"
#include "quant_unpack.h"

namespace jaxkv {
namespace {

// Where eight bits are taken from for every byte of two numbers: bit first, second, third and fourth of each.
inline __m512i bit_offsets(int first, int second, int third, int fourth) {
  const uint32_t one = static_cast<uint32_t>(first | second << 8 | third << 16 | fourth << 24);
  return _mm512_set1_epi64(static_cast<int64_t>(one | static_cast<uint64_t>(one + 0x20202020) << 32));
}

// bf16 of the sixteen nibbles, twice: a lookup of a word reads the low five bits of its index.
alignas(64) constexpr uint16_t kNibbles[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
// The same less eight.
alignas(64) constexpr uint16_t kSignedNibbles[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

inline void unpack_nibbles(const __m512i* bytes, const uint16_t* values, char* tile) {
  const __m512i table = _mm512_load_si512(values);
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    const __m512i offsets = bit_offsets(8 * n, 8 * n, 8 * n + 4, 8 * n + 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i nibbles = _mm512_multishift_epi64_epi8(offsets, bytes[i]);
      _mm512_store_si512(tile + (4 * i + n) * 64, _mm512_permutexvar_epi16(nibbles, table));
    }
  }
}

// Pairs of bf16 of two vectors whose numbers are bf16.
inline __m512i paired(__m512 low, __m512 high) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
}

inline void unpack_signed_bytes(const __m512i* low, const __m512i* high, char* tile) {
  const auto number = [](__m512i bytes, int n) __attribute__((always_inline)) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 24 - 8 * n), 24));
  };
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm512_store_si512(tile + (4 * i + n) * 64, paired(number(low[i], n), number(high[i], n)));
    }
  }
}

// Row j of the tile has elements j and j + 16 of every output.
template <class Rows>
inline void unpack_tile(const Rows& rows, int64_t block, char* tile) {
  __m512i bytes[8];
  rows.turned_quants(block, 0, bytes);
  if constexpr (Rows::kKind == WeightKind::kQ8_0) {
    rows.turned_quants(block, 1, bytes + 4);
    unpack_signed_bytes(bytes, bytes + 4, tile);
  } else {
    unpack_nibbles(bytes, row_kind(Rows::kKind) == WeightKind::kQ4_0 ? kSignedNibbles : kNibbles, tile);
  }
}

}  // namespace
}  // namespace jaxkv
