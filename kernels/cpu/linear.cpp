// Quantized linear layers: weights in blocks of 8 interleaved rows and groups of 32 inputs, activations rounded to
// 8 bits per group. A group's products are summed in integers (exactly), then scaled once in float.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "numbers.h"
#include "team.h"

namespace polypath {
namespace {

constexpr int kTokenTile = 128;  // rows of x whose 8-bit copy stays in the second-level cache
constexpr int kMaxTile = 4;      // rows of x that share one pass over a weight block

// What is not finite must stay visible in every output.
void poison_group(int8_t* q, float* scale, float* sum) {
  std::memset(q, 0, kGroup);
  *scale = *sum = NAN;
}

#if defined(__AVX2__)

inline float highest_of(__m256 v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline int32_t sum_of(__m256i v) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

void quantize_whole_group(const float* x, int8_t* q, float* scale, float* sum) {
  const __m256 sign = _mm256_set1_ps(-0.0f), infinity = _mm256_set1_ps(INFINITY);
  __m256 v[4], largest = _mm256_setzero_ps(), is_odd = _mm256_setzero_ps();
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    const __m256 size = _mm256_andnot_ps(sign, v[i]);
    largest = _mm256_max_ps(largest, size);
    is_odd = _mm256_or_ps(is_odd, _mm256_cmp_ps(size, infinity, _CMP_NLT_UQ));  // infinite or NaN
  }
  if (_mm256_movemask_ps(is_odd) != 0) return poison_group(q, scale, sum);
  const float high = highest_of(largest);
  const __m256 inverse = _mm256_set1_ps(high > 0.0f ? 127.0f / high : 0.0f);
  __m256i r[4];
  for (int i = 0; i < 4; ++i) r[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  const __m256i total = _mm256_add_epi32(_mm256_add_epi32(r[0], r[1]), _mm256_add_epi32(r[2], r[3]));
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(r[0], r[1]), _mm256_packs_epi32(r[2], r[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_permutevar8x32_epi32(packed, order));
  *scale = high / 127.0f;
  *sum = *scale * static_cast<float>(sum_of(total));
}

#else

void quantize_whole_group(const float* x, int8_t* q, float* scale, float* sum) {
  float largest = 0.0f;
  bool is_finite = true;
  for (int i = 0; i < kGroup; ++i) {
    const float size = std::fabs(x[i]);
    is_finite &= size < INFINITY;
    largest = size > largest ? size : largest;
  }
  if (!is_finite) return poison_group(q, scale, sum);
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  int32_t total = 0;
  for (int i = 0; i < kGroup; ++i) {
    const auto rounded = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
    q[i] = static_cast<int8_t>(rounded);
    total += rounded;
  }
  *scale = largest / 127.0f;
  *sum = *scale * static_cast<float>(total);
}

#endif

void quantize_row(const float* x, int in, int groups, int8_t* q, float* scale, float* sum) {
  const int whole = in / kGroup;
  for (int g = 0; g < whole; ++g) quantize_whole_group(x + g * kGroup, q + g * kGroup, scale + g, sum + g);
  if (whole == groups) return;
  float rest[kGroup] = {};
  std::copy_n(x + whole * kGroup, in - whole * kGroup, rest);
  quantize_whole_group(rest, q + whole * kGroup, scale + whole, sum + whole);
}

#if defined(__AVX2__)

inline __m256i broadcast4(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// Keeps the compiler from summing in another order, for which it would need more registers than there are.
inline void keep_order(__m256i& sum) { asm("" : "+x"(sum)); }

// Integer sums of one int4 block with `tile` rows of x, as 8 int32 a row of x.
template <int tile>
inline __attribute__((always_inline)) void dot_block(const Int4Block& b, const int8_t* x, int64_t stride,
                                                     __m256i* sums) {
  const __m256i low = _mm256_set1_epi8(15);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  for (int t = 0; t < tile; ++t) sums[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.q + 32 * c));
    const __m256i w0 = _mm256_and_si256(w, low);
    const __m256i w1 = _mm256_and_si256(_mm256_srli_epi16(w, 4), low);
#pragma GCC unroll 8
    for (int t = 0; t < tile; ++t) {
      sums[t] = _mm256_dpbusd_epi32(sums[t], w0, broadcast4(x + t * stride + 8 * c));
      sums[t] = _mm256_dpbusd_epi32(sums[t], w1, broadcast4(x + t * stride + 8 * c + 4));
    }
  }
#else
  // Sixteen-bit sums hold a whole group: 8 x 2 x 15 x 127 = 30,480.
  __m256i narrow[tile];
  for (int t = 0; t < tile; ++t) narrow[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int half = 0; half < 8; ++half) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.q + 32 * (half / 2)));
    const __m256i w = _mm256_and_si256(half % 2 ? _mm256_srli_epi16(both, 4) : both, low);
#pragma GCC unroll 8
    for (int t = 0; t < tile; ++t) {
      const __m256i products = _mm256_maddubs_epi16(w, broadcast4(x + t * stride + 4 * half));
      narrow[t] = _mm256_add_epi16(narrow[t], products);
      keep_order(narrow[t]);
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int t = 0; t < tile; ++t) sums[t] = _mm256_madd_epi16(narrow[t], ones);
#endif
}

// The same for int8 weights: |w| times x with w's sign, 2 x 128 x 127 = 32,512 fits sixteen bits.
template <int tile>
inline __attribute__((always_inline)) void dot_block(const Int8Block& b, const int8_t* x, int64_t stride,
                                                     __m256i* sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int t = 0; t < tile; ++t) sums[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int c = 0; c < 8; ++c) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.q + 32 * c));
    const __m256i size = _mm256_abs_epi8(w);
#pragma GCC unroll 8
    for (int t = 0; t < tile; ++t) {
      const __m256i signed_x = _mm256_sign_epi8(broadcast4(x + t * stride + 4 * c), w);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
      sums[t] = _mm256_dpbusd_epi32(sums[t], size, signed_x);
#else
      const __m256i pairs = _mm256_maddubs_epi16(size, signed_x);
      sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs, ones));
#endif
      keep_order(sums[t]);
    }
  }
  (void)ones;
}

inline __m256 halves(const uint16_t* h) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h)));
}

inline __m256 offsets(const Int4Block& b) { return halves(b.m); }
inline __m256 offsets(const Int8Block&) { return _mm256_setzero_ps(); }

template <typename Block>
constexpr bool has_offsets = std::is_same_v<Block, Int4Block>;

// out[t][0..8) for `tile` rows of x.
template <typename Block, int tile>
inline __attribute__((always_inline)) void dot_rows(const Block* blocks, int groups, const Quantized& x, int first,
                                                    float (*out)[kRows]) {
  const int64_t stride = static_cast<int64_t>(groups) * kGroup;
  const int8_t* q = x.q + first * stride;
  const float* scale = x.scale + static_cast<int64_t>(first) * groups;
  const float* sum = x.sum + static_cast<int64_t>(first) * groups;
  __m256 total[tile];
  for (int t = 0; t < tile; ++t) total[t] = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    _mm_prefetch(reinterpret_cast<const char*>(blocks + g + 12), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(blocks + g + 12) + 64, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(blocks + g + 12) + 128, _MM_HINT_T0);
    __m256i sums[tile];
    dot_block<tile>(blocks[g], q + g * kGroup, stride, sums);
    const __m256 d = halves(blocks[g].d);
    for (int t = 0; t < tile; ++t) {
      const __m256 s = _mm256_mul_ps(d, _mm256_set1_ps(scale[static_cast<int64_t>(t) * groups + g]));
      total[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[t]), s, total[t]);
      if constexpr (has_offsets<Block>) {
        const __m256 shift = _mm256_set1_ps(sum[static_cast<int64_t>(t) * groups + g]);
        total[t] = _mm256_fmadd_ps(offsets(blocks[g]), shift, total[t]);
      }
    }
  }
  for (int t = 0; t < tile; ++t) _mm256_storeu_ps(out[t], total[t]);
}

#else  // portable

inline int weight(const Int4Block& b, int row, int input) {
  const int c = input / 8, i = input % 8;
  const uint8_t byte = b.q[32 * c + 4 * row + i % 4];
  return i < 4 ? byte & 15 : byte >> 4;
}
inline int weight(const Int8Block& b, int row, int input) { return b.q[32 * (input / 4) + 4 * row + input % 4]; }
inline float offset(const Int4Block& b, int row) { return half_to_float(b.m[row]); }
inline float offset(const Int8Block&, int) { return 0.0f; }

template <typename Block, int tile>
void dot_rows(const Block* blocks, int groups, const Quantized& x, int first, float (*out)[kRows]) {
  for (int t = 0; t < tile; ++t) {
    for (int r = 0; r < kRows; ++r) out[t][r] = 0.0f;
    const int64_t at = static_cast<int64_t>(first + t) * groups;
    for (int g = 0; g < groups; ++g) {
      const int8_t* q = x.q + (at + g) * kGroup;
      for (int r = 0; r < kRows; ++r) {
        int32_t total = 0;
        for (int i = 0; i < kGroup; ++i) total += weight(blocks[g], r, i) * q[i];
        out[t][r] += half_to_float(blocks[g].d[r]) * x.scale[at + g] * static_cast<float>(total) +
                     offset(blocks[g], r) * x.sum[at + g];
      }
    }
  }
}

#endif

struct Task {
  Quantized x;
  int rows;
  Matrix w;
  const float* bias;
  const float* residual;
  float* y;
};

inline void store(const Task& task, int token, int first_row, const float* values) {
  const int n = std::min(kRows, task.w.out - first_row);
  const int64_t at = static_cast<int64_t>(token) * task.w.out + first_row;
  for (int r = 0; r < n; ++r) {
    float v = values[r];
    if (task.bias != nullptr) v += task.bias[first_row + r];
    if (task.residual != nullptr) v += task.residual[at + r];
    task.y[at + r] = v;
  }
}

template <typename Block>
void multiply(const Task& task, int block_row, int first, int last) {
  const int groups = (task.w.in + kGroup - 1) / kGroup;
  const Block* blocks = static_cast<const Block*>(task.w.blocks) + static_cast<int64_t>(block_row) * groups;
  float out[kMaxTile][kRows];
  int token = first;
  for (; token + 4 <= last; token += 4) {
    dot_rows<Block, 4>(blocks, groups, task.x, token, out);
    for (int t = 0; t < 4; ++t) store(task, token + t, block_row * kRows, out[t]);
  }
  if (token + 2 <= last) {
    dot_rows<Block, 2>(blocks, groups, task.x, token, out);
    for (int t = 0; t < 2; ++t) store(task, token + t, block_row * kRows, out[t]);
    token += 2;
  }
  if (token < last) {
    dot_rows<Block, 1>(blocks, groups, task.x, token, out);
    store(task, token, block_row * kRows, out[0]);
  }
}

// Memory for 8-bit activations that lives as long as the calling thread.
Quantized scratch(int rows, int groups) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local size_t capacity = 0;
  const size_t cells = static_cast<size_t>(rows) * groups;
  const size_t bytes = cells * (kGroup + 2 * sizeof(float)) + 64;
  if (bytes > capacity) {
    memory.reset(new char[bytes]);
    capacity = bytes;
  }
  char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
  auto* scale = reinterpret_cast<float*>(at);
  return {reinterpret_cast<int8_t*>(scale + 2 * cells), scale, scale + cells};
}

Quantized quantize(const float* x, int64_t x_stride, int rows, int in) {
  const int groups = (in + kGroup - 1) / kGroup;
  const Quantized q = scratch(rows, groups);
  constexpr int kRowsAtOnce = 8;
  auto work = [&](int chunk) {
    const int last = std::min(rows, (chunk + 1) * kRowsAtOnce);
    for (int row = chunk * kRowsAtOnce; row < last; ++row) {
      const int64_t at = static_cast<int64_t>(row) * groups;
      quantize_row(x + row * x_stride, in, groups, q.q + at * kGroup, q.scale + at, q.sum + at);
    }
  };
  team().run((rows + kRowsAtOnce - 1) / kRowsAtOnce, work);
  return q;
}

}  // namespace

void linear(const float* x, int64_t x_stride, int rows, const Matrix& w, const float* bias,
            const float* residual, float* y) {
  const Task task{quantize(x, x_stride, rows, w.in), rows, w, bias, residual, y};
  const int block_rows = (w.out + kRows - 1) / kRows;
  const int token_tiles = (rows + kTokenTile - 1) / kTokenTile;
  const int wanted = 8 * team().size();  // chunks a thread, so that a busy core costs an eighth at most
  const int per_chunk = std::max(1, std::min(64, block_rows / wanted));
  const int row_chunks = (block_rows + per_chunk - 1) / per_chunk;
  auto work = [&](int chunk) {
    const int first = chunk / row_chunks * kTokenTile;
    const int last = std::min(rows, first + kTokenTile);
    const int begin = chunk % row_chunks * per_chunk;
    for (int b = begin; b < std::min(block_rows, begin + per_chunk); ++b) {
      if (w.storage == Storage::kInt4) {
        multiply<Int4Block>(task, b, first, last);
      } else {
        multiply<Int8Block>(task, b, first, last);
      }
    }
  };
  team().run(token_tiles * row_chunks, work);
}

void dequantize_row(const Matrix& w, int row, float* out) {
  const int groups = (w.in + kGroup - 1) / kGroup;
  const int r = row % kRows;
  const int64_t first = static_cast<int64_t>(row / kRows) * groups;
  for (int g = 0; g < groups; ++g, out += kGroup) {
    const int n = std::min(kGroup, w.in - g * kGroup);
    if (w.storage == Storage::kInt4) {
      const Int4Block& b = static_cast<const Int4Block*>(w.blocks)[first + g];
      const float d = half_to_float(b.d[r]), m = half_to_float(b.m[r]);
      for (int i = 0; i < n; ++i) {
        const uint8_t byte = b.q[32 * (i / 8) + 4 * r + i % 4];
        out[i] = d * static_cast<float>(i % 8 < 4 ? byte & 15 : byte >> 4) + m;
      }
    } else {
      const Int8Block& b = static_cast<const Int8Block*>(w.blocks)[first + g];
      const float d = half_to_float(b.d[r]);
      for (int i = 0; i < n; ++i) out[i] = d * static_cast<float>(b.q[32 * (i / 4) + 4 * r + i % 4]);
    }
  }
}

}  // namespace polypath
