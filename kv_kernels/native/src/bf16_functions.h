// Functions of single numbers whose results are rounded to bfloat16 where they are used: to 2^-16, in half the time.
#pragma once

#include "elementwise.h"
#include "simd_avx512.h"

namespace jaxkv {
namespace {

// e^x. 2^t is 2^floor(t) times a polynomial of the rest, exact at 0; of an infinity the instructions take 0 for the rest.
inline __m512 quick_exp(__m512 x) {
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 rest = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(0.0134266847f);
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.0522424728f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.2412801981f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.6930448413f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, t);  // by 2^floor(t)
}

// activation(x) * up. The sigmoid is 1 / (1 + e^-z), and the quotient a guess to 2^-14.
inline __m512 quick_gated(Activation activation, __m512 x, __m512 up) {
  const __m512 z = gate_argument<Avx512Simd>(activation, x);
  const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), quick_exp(_mm512_sub_ps(_mm512_setzero_ps(), z)));
  return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_rcp14_ps(below)), up);
}

}  // namespace
}  // namespace jaxkv
