// Functions of single numbers, and the norm of a row, for one instruction set.
#pragma once

#include <cmath>

#include "convert.h"

namespace jaxkv {
namespace {

// e^x for x <= 0 (and a little above), to about 1 ulp; exactly 0 below -87.
template <class S>
static inline typename S::V exp_nonpositive(typename S::V x) {
  using V = typename S::V;
  const V floor = S::broadcast(-87.0f);
  const V clamped = S::max(floor, x);  // in this order a NaN stays one
  const V n = S::round(S::mul(clamped, S::broadcast(1.44269504f)));
  V r = S::fma(n, S::broadcast(-0.693359375f), clamped);
  r = S::fma(n, S::broadcast(2.12194440e-4f), r);
  V y = S::broadcast(1.9875691500e-4f);
  y = S::fma(y, r, S::broadcast(1.3981999507e-3f));
  y = S::fma(y, r, S::broadcast(8.3334519073e-3f));
  y = S::fma(y, r, S::broadcast(4.1665795894e-2f));
  y = S::fma(y, r, S::broadcast(1.6666665459e-1f));
  y = S::fma(y, r, S::broadcast(5.0000001201e-1f));
  y = S::add(S::fma(S::mul(r, r), y, r), S::broadcast(1.0f));
  return S::zero_where_below(x, floor, S::times_power_of_two(y, n));
}

template <class S>
static inline typename S::V magnitude(typename S::V x) {
  return S::max(x, S::sub(S::zero(), x));
}

// cap * tanh(x / cap), through e^(-2|x/cap|) so that nothing overflows.
template <class S>
static inline typename S::V capped(typename S::V x, float cap) {
  using V = typename S::V;
  const V one = S::broadcast(1.0f), scaled = S::div(x, S::broadcast(cap));
  const V e = exp_nonpositive<S>(S::mul(magnitude<S>(scaled), S::broadcast(-2.0f)));
  const V tanh_size = S::div(S::sub(one, e), S::add(one, e));
  return S::mul(S::broadcast(cap), S::with_sign_of(tanh_size, x));
}

// x * sigmoid(z), through e = e^(-|z|) so that nothing overflows: 1 / (1 + e) where z >= 0, e / (1 + e) below.
template <class S>
static inline typename S::V times_sigmoid(typename S::V x, typename S::V z) {
  using V = typename S::V;
  const V one = S::broadcast(1.0f);
  const V e = exp_nonpositive<S>(S::sub(S::zero(), magnitude<S>(z)));
  const V numerator = S::add(e, S::zero_where_below(z, S::zero(), S::sub(one, e)));
  return S::mul(x, S::div(numerator, S::add(one, e)));
}

// z where activation(x) is x sigmoid(z).
template <class S>
static inline typename S::V gate_argument(Activation activation, typename S::V x) {
  if (activation != Activation::kGeluTanh) return x;
  // gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))
  const typename S::V cube = S::mul(S::mul(x, x), x);
  return S::mul(S::fma(cube, S::broadcast(0.044715f), x), S::broadcast(1.5957691216f));
}

template <class S>
static void gate(Activation activation, const float* up, int64_t count, float* gate) {
  for (int64_t i = 0; i < count; i += S::kWidth) {
    const typename S::V x = S::load(gate + i);
    S::store(gate + i, S::mul(times_sigmoid<S>(x, gate_argument<S>(activation, x)), S::load(up + i)));
  }
}

template <class S>
static int64_t argmax(const float* x, int64_t count, float* best) {
  constexpr int64_t kRun = 1024;  // numbers that are looked through again for their largest
  constexpr float kLargest = __FLT_MAX__;
  int64_t begin = -1;
  for (int64_t first = 0; first < count; first += kRun) {
    const int64_t end = first + kRun < count ? first + kRun : count;
    typename S::V highest = S::broadcast(-__builtin_inff());
    int64_t i = first;
    for (; i + S::kWidth <= end; i += S::kWidth) highest = S::max(S::load(x + i), highest);  // so that a nan is lost
    float largest = S::highest(highest);
    for (; i < end; ++i) largest = x[i] > largest ? x[i] : largest;
    largest = largest > kLargest ? kLargest : largest;
    if (largest > *best) *best = largest, begin = first;
  }
  if (begin < 0) return -1;
  while (!(x[begin] >= *best)) ++begin;
  return begin;
}

template <class S>
static void rotate(const float* cos, const float* sin, int64_t count, float* x) {
  using V = typename S::V;
  const int64_t whole = count / S::kWidth * S::kWidth;
  for (int64_t i = 0; i < whole; i += S::kWidth) {
    const V c = S::load(cos + i), s = S::load(sin + i), first = S::load(x + i), second = S::load(x + count + i);
    S::store(x + i, S::sub(S::mul(first, c), S::mul(second, s)));
    S::store(x + count + i, S::fma(second, c, S::mul(first, s)));
  }
  for (int64_t i = whole; i < count; ++i) {
    const float first = x[i], second = x[count + i];
    x[i] = first * cos[i] - second * sin[i];
    x[count + i] = second * cos[i] + first * sin[i];
  }
}

template <class S>
static void normalize(const float* x, const float* weight, int64_t count, float eps, float* out) {
  using V = typename S::V;
  const int64_t whole = count / S::kWidth * S::kWidth;
  V squares = S::zero();
  for (int64_t i = 0; i < whole; i += S::kWidth) {
    const V value = S::load(x + i);
    squares = S::fma(value, value, squares);
  }
  float sum = S::sum(squares);
  for (int64_t i = whole; i < count; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(count) + eps);
  for (int64_t i = 0; i < whole; i += S::kWidth)
    S::store(out + i, S::mul(S::mul(S::load(x + i), S::broadcast(factor)), S::load(weight + i)));
  for (int64_t i = whole; i < count; ++i) out[i] = x[i] * factor * weight[i];
}

}  // namespace
}  // namespace jaxkv
