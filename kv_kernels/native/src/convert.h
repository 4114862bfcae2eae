// Runs of numbers between storage types and float32, for one instruction set.
#pragma once

#include "half.h"
#include "kernels.h"

namespace jaxkv {
namespace {

// The first `count` (below the vector's width) numbers at p, zeros after them.
template <class S, class T>
static inline void pad_vector(const T* p, int64_t count, T* padded) {
  for (int i = 0; i < S::kWidth; ++i) padded[i] = i < count ? p[i] : T(0);
}

template <class S, Element E>
static inline typename S::V load_as_float(const void* base, int64_t index) {
  if constexpr (E == Element::kF32) return S::load(static_cast<const float*>(base) + index);
  if constexpr (E == Element::kF16) return S::load_f16(static_cast<const uint16_t*>(base) + index);
  if constexpr (E == Element::kBF16) return S::load_bf16(static_cast<const uint16_t*>(base) + index);
}

template <class S, Element E>
static inline typename S::V load_tail_as_float(const void* base, int64_t index, int64_t count) {
  if constexpr (E == Element::kF32) {
    alignas(64) float padded[S::kWidth];
    pad_vector<S>(static_cast<const float*>(base) + index, count, padded);
    return S::load(padded);
  } else {
    alignas(64) uint16_t padded[S::kWidth];
    pad_vector<S>(static_cast<const uint16_t*>(base) + index, count, padded);
    return load_as_float<S, E>(padded, 0);
  }
}

// out has room for `count` rounded up to the vector's width, and gets zeros there.
template <class S, Element E>
static inline void widen_padded(const void* from, int64_t index, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + S::kWidth <= count; i += S::kWidth) S::store(out + i, load_as_float<S, E>(from, index + i));
  if (i < count) S::store(out + i, load_tail_as_float<S, E>(from, index + i, count - i));
}

template <class S>
static inline void widen_padded(Element element, const void* from, int64_t index, int64_t count, float* out) {
  switch (element) {
    case Element::kF32: return widen_padded<S, Element::kF32>(from, index, count, out);
    case Element::kF16: return widen_padded<S, Element::kF16>(from, index, count, out);
    case Element::kBF16: return widen_padded<S, Element::kBF16>(from, index, count, out);
  }
}

// Exactly `count` numbers out. The last vector overlaps the one before, which is quicker than a tail of its own.
template <class S, Element E>
static inline void widen_exactly(const void* from, int64_t count, float* out) {
  if (count >= S::kWidth) {
    for (int64_t i = 0; i + S::kWidth < count; i += S::kWidth) S::store(out + i, load_as_float<S, E>(from, i));
    S::store(out + count - S::kWidth, load_as_float<S, E>(from, count - S::kWidth));
  } else if (count > 0) {
    alignas(64) float tail[S::kWidth];
    S::store(tail, load_tail_as_float<S, E>(from, 0, count));
    for (int64_t i = 0; i < count; ++i) out[i] = tail[i];
  }
}

template <class S>
static void widen(const void* from, Element element, int64_t count, float* out) {
  switch (element) {
    case Element::kF32: return widen_exactly<S, Element::kF32>(from, count, out);
    case Element::kF16: return widen_exactly<S, Element::kF16>(from, count, out);
    case Element::kBF16: return widen_exactly<S, Element::kBF16>(from, count, out);
  }
}

template <class S>
static inline void narrow(const float* from, int64_t count, Element element, void* base, int64_t index) {
  if (element == Element::kF32) {
    float* out = static_cast<float*>(base) + index;
    for (int64_t i = 0; i < count; ++i) out[i] = from[i];
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(base) + index;
  if (element == Element::kBF16) {
    for (int64_t i = 0; i < count; ++i) out[i] = float_to_bf16(from[i]);
    return;
  }
  int64_t i = 0;
  for (; i + S::kWidth <= count; i += S::kWidth) S::store_f16(out + i, S::load(from + i));
  for (; i < count; ++i) out[i] = float_to_f16(from[i]);
}

template <class S>
static void narrow_all(const float* from, int64_t count, Element element, void* out) {
  narrow<S>(from, count, element, out, 0);
}

}  // namespace
}  // namespace jaxkv
