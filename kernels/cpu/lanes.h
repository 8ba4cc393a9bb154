// Eight floats at a time, on any instruction set: the compiler splits them where registers are narrower.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace polypath {

constexpr int kLanes = 8;
using Lanes = float __attribute__((vector_size(4 * kLanes)));

inline Lanes load(const float* at) {
  Lanes v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

inline void save(float* at, const Lanes& v) { std::memcpy(at, &v, sizeof v); }

inline Lanes spread(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

// a * b + c; on AVX2 rounded once, whatever the compiler makes of the code around it.
inline Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) {
#if defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// Of each pair the larger number; b where a is NaN.
inline Lanes larger(const Lanes& a, const Lanes& b) {
#if defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

using Mask = int32_t __attribute__((vector_size(4 * kLanes)));  // of a comparison: -1 where it holds

inline bool any_of(const Mask& m) {
#if defined(__AVX2__)
  return _mm256_movemask_epi8(__m256i(m)) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= m[i];
  return found != 0;
#endif
}

inline float total_of(const Lanes& v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// e^x as fast_exp, eight at a time.
inline Lanes exponential(const Lanes& x) {
#if defined(__AVX2__) && defined(__FMA__)
  // The order of operands keeps NaN.
  const __m256 bounded = _mm256_min_ps(_mm256_set1_ps(88.3f), _mm256_max_ps(_mm256_set1_ps(-87.3f), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(bounded, _mm256_set1_ps(1.44269504f)), 8);  // to nearest, quietly
  const Lanes r = multiply_add(n, spread(2.12194440e-4f), multiply_add(n, spread(-0.693359375f), bounded));
  Lanes p = multiply_add(spread(1.9875691500e-4f), r, spread(1.3981999507e-3f));
  p = multiply_add(p, r, spread(8.3334519073e-3f));
  p = multiply_add(p, r, spread(4.1665795894e-2f));
  p = multiply_add(p, r, spread(1.6666665459e-1f));
  p = multiply_add(p, r, spread(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + 1.0f);
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return p * Lanes(_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
#else
  Lanes y;
  for (int i = 0; i < kLanes; ++i) y[i] = fast_exp(x[i]);
  return y;
#endif
}

struct Bfloat {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float widen(float f) { return f; }
inline float widen(Bfloat b) { return bfloat_to_float(b.bits); }
inline float widen(Half h) { return half_to_float(h.bits); }

inline Lanes load(const Bfloat* at) {
#if defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
  Lanes v;
  for (int i = 0; i < kLanes; ++i) v[i] = bfloat_to_float(at[i].bits);
  return v;
#endif
}

inline Lanes load(const Half* at) {
#if defined(__F16C__) && defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
  Lanes v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(at[i].bits);
  return v;
#endif
}

}  // namespace polypath
