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

struct Bfloat {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

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
