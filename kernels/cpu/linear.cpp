// Quantized linear layers: weights in blocks of 8 interleaved rows and groups of 32 inputs, activations rounded to
// 8 bits per group. A group's products are summed in integers (exactly), then scaled once in float.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "numbers.h"
#include "team.h"

namespace polypath {
namespace {

constexpr int kTokenTile = 128;  // rows of x whose 8-bit copy stays in the second-level cache
constexpr int kTile = 4;         // rows of x that lie interleaved and share one pass over weights
constexpr int kWide = 2;         // rows of blocks that share one pass over a tile
constexpr int kFewRows = 4;      // up to here memory is the bound, and one stream of weights reads faster than two
constexpr int kManyRows = 16;    // from here on unpacking 4-bit weights once for all rows pays
constexpr int64_t kSlab = 24;    // groups whose unpacked weights stay in the first-level cache
constexpr float kSymmetric = -8.0f;  // m = -8 d is exact in float: sums are those of a block that holds m

// Activations in 8 bits: x = scale * q for each group of 32. Rows lie in tiles of kTile (what is left over forms a
// smaller last tile), so that a kernel reads one stream: of a tile of n rows, q is [groups, 8, n, 4] and `factors` is
// [groups, 2, n], the scale and then scale times the sum of the group's q.
struct Quantized {
  int8_t* q;
  float* factors;
};

// Memory in whole cache lines that grows as needed and is kept, one for each thread that asks.
class Memory {
 public:
  void* at_least(size_t bytes) {
    if (bytes + 64 > capacity_) {
      capacity_ = bytes + 64;
      memory_.reset(new char[capacity_]);
    }
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<char[]> memory_;
  size_t capacity_ = 0;
};

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

void quantize_group(const float* x, int8_t* q, float* scale, float* sum) {
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

void quantize_group(const float* x, int8_t* q, float* scale, float* sum) {
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

struct Group {
  alignas(32) int8_t q[kGroup];
  float scale, sum;
};

// Four inputs of each of `rows` rows side by side.
void interleave(const Group* from, int rows, int8_t* q) {
#if defined(__AVX2__)
  if (rows == 4) {
    __m256i r[4];
    for (int t = 0; t < 4; ++t) r[t] = _mm256_load_si256(reinterpret_cast<const __m256i*>(from[t].q));
    const __m256i low01 = _mm256_unpacklo_epi32(r[0], r[1]), high01 = _mm256_unpackhi_epi32(r[0], r[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(r[2], r[3]), high23 = _mm256_unpackhi_epi32(r[2], r[3]);
    const __m256i a = _mm256_unpacklo_epi64(low01, low23), b = _mm256_unpackhi_epi64(low01, low23);
    const __m256i c = _mm256_unpacklo_epi64(high01, high23), d = _mm256_unpackhi_epi64(high01, high23);
    auto* to = reinterpret_cast<__m256i*>(q);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(c, d, 0x20));
    _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(a, b, 0x31));
    _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(c, d, 0x31));
    return;
  }
#endif
  for (int c = 0; c < kGroup / 4; ++c) {
    for (int t = 0; t < rows; ++t) std::memcpy(q + 4 * (c * rows + t), from[t].q + 4 * c, 4);
  }
}

// One weight and its offset, in plain terms: w = d * weight + offset.
inline int nibble(const uint8_t* q, int row, int input) {
  const int c = input / 8, i = input % 8;
  const uint8_t byte = q[32 * c + 4 * row + i % 4];
  return i < 4 ? byte & 15 : byte >> 4;
}
inline int weight(const Int4Block& b, int row, int input) { return nibble(b.q, row, input); }
inline int weight(const Int4SymmetricBlock& b, int row, int input) { return nibble(b.q, row, input); }
inline int weight(const Int8Block& b, int row, int input) { return b.q[32 * (input / 4) + 4 * row + input % 4]; }
inline float offset(const Int4Block& b, int row) { return half_to_float(b.m[row]); }
inline float offset(const Int4SymmetricBlock& b, int row) { return kSymmetric * half_to_float(b.d[row]); }
inline float offset(const Int8Block&, int) { return 0.0f; }

// Where a thread that has come to the block `end` goes on: it leaves out `skip` blocks that others read.
template <typename Block>
struct Route {
  const Block* end;
  int64_t skip;
};

// `rows` rows of x, at most kTile, as one tile.
void quantize_tile(const float* x, int64_t x_stride, int rows, int in, int8_t* q, float* factors) {
  Group group[kTile];
  for (int first = 0; first < in; first += kGroup) {
    for (int t = 0; t < rows; ++t) {
      float rest[kGroup] = {};
      const float* from = x + t * x_stride + first;
      if (in - first < kGroup) from = std::copy_n(from, in - first, rest) - (in - first);
      quantize_group(from, group[t].q, &group[t].scale, &group[t].sum);
      factors[t] = group[t].scale;
      factors[rows + t] = group[t].sum;
    }
    interleave(group, rows, q);
    q += rows * kGroup;
    factors += 2 * rows;
  }
}

#if defined(__AVX2__)

inline __m256i broadcast4(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

inline __m256i load_bytes(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

// Keeps the compiler from summing in another order, for which it would need more registers than there are.
inline void keep_order(__m256i& sum) { asm("" : "+x"(sum)); }

inline __m256 halves(const uint16_t* h) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h)));
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr bool kHasDot = true;
inline __m256i dot4(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_epi32(sum, w, x); }
#else
constexpr bool kHasDot = false;
inline __m256i dot4(__m256i sum, __m256i, __m256i) { return sum; }
#endif

// What the multiplication below reads of a block: chunk c holds 4 inputs of each of 8 rows.
inline __m256i nibbles(const uint8_t* q, int c) {
  const __m256i both = load_bytes(q + 32 * (c / 2));
  return _mm256_and_si256(c % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}
inline __m256i chunk(const Int4Block& b, int c) { return nibbles(b.q, c); }
inline __m256 step_of(const Int4Block& b) { return halves(b.d); }
inline __m256 offset_of(const Int4Block& b) { return halves(b.m); }

inline __m256i chunk(const Int4SymmetricBlock& b, int c) { return nibbles(b.q, c); }
inline __m256 step_of(const Int4SymmetricBlock& b) { return halves(b.d); }
inline __m256 offset_of(const Int4SymmetricBlock& b) { return _mm256_mul_ps(step_of(b), _mm256_set1_ps(kSymmetric)); }

// A 4-bit block whose weights are bytes and whose factors are floats.
struct OpenBlock {
  uint8_t q[256];
  float d[kRows];
  float m[kRows];
};
inline __m256i chunk(const OpenBlock& b, int c) { return load_bytes(b.q + 32 * c); }
inline __m256 step_of(const OpenBlock& b) { return _mm256_loadu_ps(b.d); }
inline __m256 offset_of(const OpenBlock& b) { return _mm256_loadu_ps(b.m); }

constexpr int64_t kAhead = 24;  // blocks between a block and the one to ask for

// Weights are read once a pass over rows of x, mostly from memory, so ask for those of the next pass.
template <typename Block>
inline __attribute__((always_inline)) void fetch(const Block* block) {
#pragma GCC unroll 8
  for (size_t i = 0; i < sizeof(Block); i += 64) _mm_prefetch(reinterpret_cast<const char*>(block) + i, _MM_HINT_T0);
}
inline void fetch(const OpenBlock*) {}  // was just written

template <typename Block>
void open_blocks(const Block* from, int64_t count, OpenBlock* to) {
  for (int64_t i = 0; i < count; ++i) {
    fetch(from + kAhead + i);
    for (int c = 0; c < 8; ++c) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[i].q + 32 * c), chunk(from[i], c));
    _mm256_storeu_ps(to[i].d, step_of(from[i]));
    _mm256_storeu_ps(to[i].m, offset_of(from[i]));
  }
}

inline __m256i chunk(const Int8Block& b, int c) { return load_bytes(b.q + 32 * c); }
inline __m256 step_of(const Int8Block& b) { return halves(b.d); }
inline __m256 offset_of(const Int8Block&) { return _mm256_setzero_ps(); }

// Sums of 4-bit weights times x: sixteen bits hold a whole group, 8 x 2 x 15 x 127 = 30,480.
template <typename Block>
struct Sums {
  static inline __attribute__((always_inline)) __m256i add(__m256i sum, __m256i w, __m256i x) {
    return kHasDot ? dot4(sum, w, x) : _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
  }
  static inline __attribute__((always_inline)) __m256i whole(__m256i sum) {
    return kHasDot ? sum : _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
  }
};

// Of 8-bit weights: |w| times x with w's sign, 2 x 128 x 127 = 32,512 fits sixteen bits.
template <>
struct Sums<Int8Block> {
  static inline __attribute__((always_inline)) __m256i add(__m256i sum, __m256i w, __m256i x) {
    const __m256i size = _mm256_abs_epi8(w), signed_x = _mm256_sign_epi8(x, w);
    if (kHasDot) return dot4(sum, size, signed_x);
    const __m256i pairs = _mm256_maddubs_epi16(size, signed_x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static inline __attribute__((always_inline)) __m256i whole(__m256i sum) { return sum; }
};

// Adds to out[t][b][0..8) for `tile` rows of x and `wide` rows of blocks, which lie `stride` blocks apart.
template <typename Block, int tile, int wide>
__attribute__((noinline)) void dot_tile(const Block* blocks, int64_t stride, int64_t groups, const int8_t* q,
                                        const float* factors, const Route<Block>& route, float* out) {
  const Block* const end = route.end;
  const int64_t skip = route.skip;
  __m256 total[tile][wide];
#pragma GCC unroll 8
  for (int t = 0; t < tile; ++t) {
#pragma GCC unroll 8
    for (int b = 0; b < wide; ++b) total[t][b] = _mm256_load_ps(out + (t * wide + b) * kRows);
  }
  const int64_t ahead = wide * stride <= 2 * kAhead ? wide * stride : kAhead;
  for (int64_t g = 0; g < groups; ++g) {
    const Block* block = blocks + g;
#pragma GCC unroll 8
    for (int b = 0; b < wide; ++b) {
      const Block* next = block + b * stride + ahead;
      fetch(next < end ? next : next + skip);
    }
    __m256i sums[tile][wide];
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      __m256i w[wide];
#pragma GCC unroll 8
      for (int b = 0; b < wide; ++b) w[b] = chunk(block[b * stride], c);
#pragma GCC unroll 8
      for (int t = 0; t < tile; ++t) {
        const __m256i x = broadcast4(q + 4 * (c * tile + t));
#pragma GCC unroll 8
        for (int b = 0; b < wide; ++b) {
          sums[t][b] = Sums<Block>::add(c == 0 ? _mm256_setzero_si256() : sums[t][b], w[b], x);
          keep_order(sums[t][b]);
        }
      }
    }
#pragma GCC unroll 8
    for (int b = 0; b < wide; ++b) {
      const __m256 d = step_of(block[b * stride]), m = offset_of(block[b * stride]);
#pragma GCC unroll 8
      for (int t = 0; t < tile; ++t) {
        const __m256 s = _mm256_mul_ps(d, _mm256_broadcast_ss(factors + t));
        total[t][b] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(Sums<Block>::whole(sums[t][b])), s, total[t][b]);
        if constexpr (!std::is_same_v<Block, Int8Block>) {
          total[t][b] = _mm256_fmadd_ps(m, _mm256_broadcast_ss(factors + tile + t), total[t][b]);
        }
      }
    }
    q += tile * kGroup;
    factors += 2 * tile;
  }
#pragma GCC unroll 8
  for (int t = 0; t < tile; ++t) {
#pragma GCC unroll 8
    for (int b = 0; b < wide; ++b) _mm256_store_ps(out + (t * wide + b) * kRows, total[t][b]);
  }
}

#else  // portable

// Adds a group's products to 8 outputs. One copy of it for all blocks and tiles: the compiler may sum in any order, and
// in another one where it sees that an offset is a multiple of a step.
__attribute__((noinline)) void add_group(const float* d, const float* m, const int32_t* sums, float scale, float sum,
                                         float* out) {
  for (int r = 0; r < kRows; ++r) out[r] += d[r] * scale * static_cast<float>(sums[r]) + m[r] * sum;
}

template <typename Block>
void add_block(const Block& b, const int8_t* q, const float* factors, int tile, int wide, float* out) {
  float d[kRows], m[kRows];
  for (int r = 0; r < kRows; ++r) d[r] = half_to_float(b.d[r]), m[r] = offset(b, r);
  for (int t = 0; t < tile; ++t) {
    int32_t sums[kRows] = {};
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kGroup; ++i) sums[r] += weight(b, r, i) * q[4 * (i / 4 * tile + t) + i % 4];
    }
    add_group(d, m, sums, factors[t], factors[tile + t], out + t * wide * kRows);
  }
}

template <typename Block, int tile, int wide>
void dot_tile(const Block* blocks, int64_t stride, int64_t groups, const int8_t* q, const float* factors,
              const Route<Block>&, float* out) {
  for (int64_t g = 0; g < groups; ++g, q += tile * kGroup, factors += 2 * tile) {
    for (int b = 0; b < wide; ++b) add_block(blocks[b * stride + g], q, factors, tile, wide, out + b * kRows);
  }
}

#endif

struct Task {
  Quantized x;
  int64_t groups;
  Matrix w;
  const float* bias;
  const float* residual;
  float* y;
  int64_t skip = 0;  // blocks between two chunks of one thread, when all go equally fast
};

// Writes outputs first_row .. first_row + count of one token.
inline void store(const Task& task, int token, int first_row, const float* values, int count) {
  const int n = std::min(count, task.w.out - first_row);
  const int64_t at = static_cast<int64_t>(token) * task.w.out + first_row;
  int r = 0;
  for (; r + kLanes <= n; r += kLanes) {
    Lanes v = load(values + r);
    if (task.bias != nullptr) v += load(task.bias + first_row + r);
    if (task.residual != nullptr) v += load(task.residual + at + r);
    save(task.y + at + r, v);
  }
  for (; r < n; ++r) {
    float v = values[r];
    if (task.bias != nullptr) v += task.bias[first_row + r];
    if (task.residual != nullptr) v += task.residual[at + r];
    task.y[at + r] = v;
  }
}

// Calls work(token, tile) for tiles of tokens first .. last, `first` beginning one; `tile` is a constant.
template <typename Work>
inline void for_each_tile(int first, int last, const Work& work) {
  for (; first + kTile <= last; first += kTile) work(first, std::integral_constant<int, kTile>());
  switch (last - first) {
    case 3: return work(first, std::integral_constant<int, 3>());
    case 2: return work(first, std::integral_constant<int, 2>());
    case 1: return work(first, std::integral_constant<int, 1>());
    default: return;
  }
}

// Tokens first .. last times `wide` rows of blocks.
template <typename Block, int wide>
void multiply_blocks(const Task& task, int block_row, int end_row, int first, int last) {
  const Block* blocks = static_cast<const Block*>(task.w.blocks) + block_row * task.groups;
  const Route<Block> route{blocks + (end_row - block_row) * task.groups, task.skip};
  for_each_tile(first, last, [&](int token, auto tile) {
    alignas(64) float out[tile * wide * kRows] = {};
    const int64_t at = token * task.groups;
    dot_tile<Block, tile, wide>(blocks, task.groups, task.groups, task.x.q + at * kGroup, task.x.factors + 2 * at, route,
                                out);
    for (int t = 0; t < tile; ++t) store(task, token + t, block_row * kRows, out + t * wide * kRows, wide * kRows);
  });
}

#if defined(__AVX2__)

// The same for many tokens: 4-bit weights are unpacked once for all, as many groups at a time as stay in the
// first-level cache.
template <typename Block, int wide>
void multiply_open(const Task& task, int block_row, int first, int last) {
  alignas(64) OpenBlock open[wide * kSlab];
  alignas(64) float out[kTokenTile * wide * kRows];
  std::fill_n(out, (last - first) * wide * kRows, 0.0f);
  for (int64_t g = 0; g < task.groups; g += kSlab) {
    const int64_t n = std::min(task.groups - g, kSlab);
    const auto* blocks = static_cast<const Block*>(task.w.blocks) + block_row * task.groups + g;
    for (int b = 0; b < wide; ++b) open_blocks(blocks + b * task.groups, n, open + b * n);
    for_each_tile(first, last, [&](int token, auto tile) {
      const int64_t at = token * task.groups + tile * g;
      float* sums = out + (token - first) * wide * kRows;
      const bool is_last = g + n == task.groups;
      dot_tile<OpenBlock, tile, wide>(open, n, n, task.x.q + at * kGroup, task.x.factors + 2 * at, {open, 0}, sums);
      if (is_last) {
        for (int t = 0; t < tile; ++t) store(task, token + t, block_row * kRows, sums + t * wide * kRows, wide * kRows);
      }
    });
  }
}

#endif

template <typename Block, int wide>
void multiply_some(const Task& task, int block_row, int end_row, int first, int last) {
#if defined(__AVX2__)
  if constexpr (!std::is_same_v<Block, Int8Block>) {
    if (last - first >= kManyRows) return multiply_open<Block, wide>(task, block_row, first, last);
  }
#endif
  multiply_blocks<Block, wide>(task, block_row, end_row, first, last);
}

template <typename Block>
void multiply(const Task& task, int begin, int end, int first, int last) {
  int row = begin;
  const bool is_wide = last - first > kFewRows;
  for (; is_wide && row + kWide <= end; row += kWide) multiply_some<Block, kWide>(task, row, end, first, last);
  for (; row < end; ++row) multiply_some<Block, 1>(task, row, end, first, last);
}

// Memory for 8-bit activations that lives as long as the calling thread.
Quantized scratch(int rows, int64_t groups) {
  thread_local Memory memory;
  const size_t cells = static_cast<size_t>(rows * groups);
  auto* at = static_cast<char*>(memory.at_least(cells * (kGroup + 2 * sizeof(float))));
  return {reinterpret_cast<int8_t*>(at), reinterpret_cast<float*>(at + cells * kGroup)};
}

Quantized quantize(const float* x, int64_t x_stride, int rows, int in) {
  const int64_t groups = (in + kGroup - 1) / kGroup;
  const Quantized to = scratch(rows, groups);
  constexpr int kRowsAtOnce = 2 * kTile;
  auto work = [&](int chunk) {
    const int last = std::min(rows, (chunk + 1) * kRowsAtOnce);
    for (int row = chunk * kRowsAtOnce; row < last; row += kTile) {
      const int64_t at = row * groups;
      quantize_tile(x + row * x_stride, x_stride, std::min(kTile, last - row), in, to.q + at * kGroup,
                    to.factors + 2 * at);
    }
  };
  team().run((rows + kRowsAtOnce - 1) / kRowsAtOnce, work);
  return to;
}

template <typename Block>
void read_row(const Matrix& w, int row, float* out) {
  const int groups = (w.in + kGroup - 1) / kGroup;
  const int r = row % kRows;
  const Block* blocks = static_cast<const Block*>(w.blocks) + static_cast<int64_t>(row / kRows) * groups;
  for (int g = 0; g < groups; ++g, out += kGroup) {
    const Block& b = blocks[g];
    const float d = half_to_float(b.d[r]), m = offset(b, r);
    const int n = std::min(kGroup, w.in - g * kGroup);
    for (int i = 0; i < n; ++i) out[i] = d * static_cast<float>(weight(b, r, i)) + m;
  }
}

}  // namespace

void linear(const float* x, int64_t x_stride, int rows, const Matrix& w, const float* bias,
            const float* residual, float* y, Best* best) {
  const int64_t groups = (w.in + kGroup - 1) / kGroup;
  Task task{quantize(x, x_stride, rows, w.in), groups, w, bias, residual, y};
  const int block_rows = (w.out + kRows - 1) / kRows;
  const int token_tiles = (rows + kTokenTile - 1) / kTokenTile;
  const int wanted = 8 * team().size();  // chunks a thread, so that a busy core costs an eighth at most
  const int per_chunk = std::max(1, std::min(64, block_rows / wanted) / kWide) * kWide;
  const int row_chunks = (block_rows + per_chunk - 1) / per_chunk;
  task.skip = (team().size() - 1) * per_chunk * groups;
  if (best != nullptr) best->split(row_chunks);
  auto work = [&](int chunk) {
    const int first = chunk / row_chunks * kTokenTile;
    const int last = std::min(rows, first + kTokenTile);
    const int begin = chunk % row_chunks * per_chunk;
    const int end = std::min(block_rows, begin + per_chunk);
    switch (w.storage) {
      case Storage::kInt4: multiply<Int4Block>(task, begin, end, first, last); break;
      case Storage::kInt4Symmetric: multiply<Int4SymmetricBlock>(task, begin, end, first, last); break;
      default: multiply<Int8Block>(task, begin, end, first, last);
    }
    for (int row = first; best != nullptr && row < last; ++row) {
      best->note(row, chunk % row_chunks, begin * kRows, std::min(end * kRows, w.out));
    }
  };
  team().run(token_tiles * row_chunks, work);
}

void dequantize_row(const Matrix& w, int row, float* out) {
  switch (w.storage) {
    case Storage::kInt4: return read_row<Int4Block>(w, row, out);
    case Storage::kInt4Symmetric: return read_row<Int4SymmetricBlock>(w, row, out);
    default: return read_row<Int8Block>(w, row, out);
  }
}

}  // namespace polypath
