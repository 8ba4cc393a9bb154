// See attention.h. Keys are read in ranges of fixed places; within a range tiles of queries meet tiles of keys with a
// running softmax (Dao et al. 2022), and the ranges of a query are folded in order. Decode rows run the same code with
// one query, a range a thread, so a token's result is the same however its prompt was cut or cached.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.h"
#include "numbers.h"
#include "team.h"

namespace polypath {
namespace {

constexpr int kRange = 64;        // keys of one running softmax; fixed, so results do not depend on the batch
constexpr int kQueryTile = 32;    // queries of one prefill chunk
constexpr int kKeyTile = 32;      // keys whose transposed copy stays in the first-level cache
constexpr int kMaxDim = 256;
constexpr int kBlock = 6;         // rows of a register block, 2 x 8 columns wide
constexpr int kSmallBlock = 4;    // of what is left over
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Call {
  const float* q;
  const Pool* pool;
  const Rows* rows;
  int heads;
  int window;
  float scale;
  float* out;
  int group() const { return heads / pool->kv_heads; }
};

// One chunk of work: queries first .. first + queries of a row's step, and some KV heads. Decode pieces read one range of
// keys into a slot for each head, prefill pieces (slot -1) have one head and read all keys.
struct Piece {
  int row;
  int kv_head;
  int first;
  int queries;
  int range;
  int slot;
  int kv_heads = 1;
  bool is_first = true;  // of its thread, so that nothing has asked for its keys yet
};

// Softmax so far of some query heads over some keys: values are scaled by e^-highest.
struct Softmax {
  float* acc;      // [rows, stride]
  float* highest;  // [rows]
  float* total;    // [rows]
};

// c[rows][16] = c * keep + a[rows][depth] b[depth][16], all sums in registers; each output is summed in the order of
// `depth`, whatever the number of rows.
template <int rows>
inline __attribute__((always_inline)) void multiply_block(const float* a, int a_stride, int depth, const float* b,
                                                          int b_stride, float* c, int c_stride, const float* keep) {
  Lanes sums[rows][2];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) sums[r][h] = keep == nullptr ? Lanes{} : load(c + r * c_stride + h * kLanes) * keep[r];
  }
#pragma GCC unroll 2
  for (int i = 0; i < depth; ++i) {
    const Lanes b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Lanes x = spread(a[r * a_stride + i]);
      sums[r][0] = multiply_add(b0, x, sums[r][0]);
      sums[r][1] = multiply_add(b1, x, sums[r][1]);
    }
    b += b_stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) save(c + r * c_stride + h * kLanes, sums[r][h]);
  }
}

// Rows of 8 numbers, in[0..8) + at, as columns.
template <typename Stored>
inline __attribute__((always_inline)) void transpose(const Stored* const* in, int at, Lanes* out) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = load(in[i] + at);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
    out[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 8; ++k) out[i][k] = widen(in[k][at + i]);
  }
#endif
}

// Sixteen numbers of each of eight keys as columns, in their order.
template <typename Stored>
inline __attribute__((always_inline)) void turn(const Stored* const* key, int at, Lanes* columns) {
  transpose(key, at, columns);
  transpose(key, at + kLanes, columns + kLanes);
}

// Sixteen numbers of a value in two vectors; and sums of such vectors, to and from their own order.
template <typename Stored>
inline __attribute__((always_inline)) void load_two(const Stored* at, Lanes* v) {
  v[0] = load(at);
  v[1] = load(at + kLanes);
}
template <typename Stored>
inline __attribute__((always_inline)) void split(const Stored*, Lanes*) {}
template <typename Stored>
inline __attribute__((always_inline)) void join(const Stored*, Lanes*) {}

#if defined(__AVX2__)

// Of bfloats, two are one word until they are parted: half the shuffles, and none to widen them. Values stay parted, even
// numbers and odd ones.
inline __m256 lower(__m256 pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)); }
inline __m256 upper(__m256 pairs) {
  return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline __attribute__((always_inline)) void turn(const Bfloat* const* key, int at, Lanes* columns) {
  const float* words[kLanes];
  for (int j = 0; j < kLanes; ++j) words[j] = reinterpret_cast<const float*>(key[j] + at);
  Lanes pairs[kLanes];
  transpose(words, 0, pairs);
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) columns[2 * i] = lower(pairs[i]), columns[2 * i + 1] = upper(pairs[i]);
}

inline __attribute__((always_inline)) void load_two(const Bfloat* at, Lanes* v) {
  const __m256 pairs = _mm256_loadu_ps(reinterpret_cast<const float*>(at));
  v[0] = lower(pairs);
  v[1] = upper(pairs);
}
inline __attribute__((always_inline)) void split(const Bfloat*, Lanes* v) {
  const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(v[0], v[1], 0x88)),
                odd = _mm256_castps_pd(_mm256_shuffle_ps(v[0], v[1], 0xdd));
  v[0] = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
  v[1] = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
}
inline __attribute__((always_inline)) void join(const Bfloat*, Lanes* v) {
  const __m256 low = _mm256_unpacklo_ps(v[0], v[1]), high = _mm256_unpackhi_ps(v[0], v[1]);
  v[0] = _mm256_permute2f128_ps(low, high, 0x20);
  v[1] = _mm256_permute2f128_ps(low, high, 0x31);
}

#endif

// Where the keys of one tile lie in the pool; their values lie `to_values` bytes behind them.
struct Places {
  const char* keys[kKeyTile];
  int count;
};

int64_t bytes_each(const Pool& pool) { return pool.type == KvType::kFloat ? sizeof(float) : sizeof(Bfloat); }
int64_t token_bytes(const Pool& pool) { return bytes_each(pool) * pool.kv_heads * pool.head_dim; }
int64_t to_values(const Pool& pool) { return token_bytes(pool) * pool.page_size; }

// Finds keys first .. first + count of one KV head.
void find_keys(const Pool& pool, const int32_t* pages, int kv_head, int first, int count, Places* places) {
  const int64_t size = bytes_each(pool) * pool.head_dim, values = to_values(pool);
  int page = first / pool.page_size, offset = first % pool.page_size;
  for (int k = 0; k < count; ++k) {
    places->keys[k] =
        static_cast<const char*>(pool.data) + pages[page] * 2 * values + offset * token_bytes(pool) + kv_head * size;
    if (++offset == pool.page_size) offset = 0, ++page;
  }
  places->count = std::max(0, count);
}

// Asks memory for keys first .. last of the tile and their values, all KV heads of the piece. Keys lie a power of two apart
// in many models, so that few places of a first-level cache could hold them: the second level is near enough.
inline void prefetch(const Call& c, const Piece& p, const Places& places, int first, int last) {
  const int64_t behind = to_values(*c.pool), size = bytes_each(*c.pool) * c.pool->head_dim * p.kv_heads;
  last = std::min(last, places.count);
  for (const int64_t ahead : {int64_t{0}, behind}) {
    for (int k = first; k < last; ++k) {
      for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(places.keys[k] + ahead + i, 0, 2);
    }
  }
}

// Reads a tile and its values through, all KV heads of the piece, in the order of memory: nothing is computed yet that
// requests could hide behind, and plain loads bring in a sequence twice as fast as a burst of requests.
inline void read_through(const Call& c, const Piece& p, const Places& places) {
  const int64_t behind = to_values(*c.pool), size = bytes_each(*c.pool) * c.pool->head_dim * p.kv_heads;
  for (const int64_t ahead : {int64_t{0}, behind}) {
    for (int k = 0; k < places.count; ++k) {
      const volatile char* at = places.keys[k] + ahead;
      for (int64_t i = 0; i < size; i += 64) static_cast<void>(at[i]);
    }
  }
}

// The memory of the next tile, asked for line by line while this one is computed, in its own order: in one go the requests
// would fill the core's queue of misses and hold it up.
class Ahead {
 public:
  // Keys of the tile and their values, all KV heads of the piece; `points` is how often `ask` will be called.
  void set(const Call& c, const Piece& p, const Places& places, int points) {
    num_runs_ = run_ = 0;
    at_ = 0;
    const int64_t behind = to_values(*c.pool), size = bytes_each(*c.pool) * c.pool->head_dim * p.kv_heads;
    for (const int64_t ahead : {int64_t{0}, behind}) {
      for (int k = 0; k < places.count; ++k) add(places.keys[k] + ahead, size);
    }
    const int64_t lines = (2 * places.count * size + kLine - 1) / kLine;
    quota_ = static_cast<int>((lines + points - 1) / points);
  }
  inline __attribute__((always_inline)) void ask() {
    for (int i = 0; i < quota_ && run_ < num_runs_; ++i) {
      const Run& run = runs_[run_];
      __builtin_prefetch(run.first + at_, 0, 2);
      at_ += kLine;
      if (at_ >= run.bytes) at_ = 0, ++run_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Run {
    const char* first;
    int64_t bytes;
  };
  void add(const char* first, int64_t bytes) {
    if (num_runs_ > 0 && runs_[num_runs_ - 1].first + runs_[num_runs_ - 1].bytes == first) {
      runs_[num_runs_ - 1].bytes += bytes;
    } else {
      runs_[num_runs_++] = {first, bytes};
    }
  }
  Run runs_[2 * kKeyTile];
  int num_runs_ = 0, run_ = 0, quota_ = 0;
  int64_t at_ = 0;
};

// The keys as columns [dim][kKeyTile]; what is missing is zero.
template <typename Stored>
void load_keys(const Places& places, int n, float* keys) {
  static const Stored zeros[kMaxDim] = {};
  for (int k0 = 0; k0 < kKeyTile; k0 += kLanes) {
    const Stored* key[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      key[j] = k0 + j < places.count ? reinterpret_cast<const Stored*>(places.keys[k0 + j]) : zeros;
    }
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      Lanes columns[2 * kLanes];
      turn(key, i, columns);
      for (int d = 0; d < 2 * kLanes; ++d) save(keys + (i + d) * kKeyTile + k0, columns[d]);
    }
    for (; i < n; ++i) {
      for (int j = 0; j < kLanes; ++j) keys[i * kKeyTile + k0 + j] = widen(key[j][i]);
    }
  }
}

// Their values as rows [kKeyTile][stride]; what is missing is zero.
template <typename Stored>
void load_values(const Places& places, int64_t to_values, int n, int stride, float* values) {
  for (int k = 0; k < places.count; ++k) {
    const auto* from = reinterpret_cast<const Stored*>(places.keys[k] + to_values);
    float* row = values + static_cast<int64_t>(k) * stride;
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) save(row + i, load(from + i));
    for (; i < n; ++i) row[i] = widen(from[i]);
    std::fill_n(row + n, stride - n, 0.0f);
  }
  std::fill_n(values + static_cast<int64_t>(places.count) * stride, static_cast<int64_t>(kKeyTile - places.count) * stride,
              0.0f);
}

template <typename Stored>
__attribute__((noinline)) void load_tile(const Pool& pool, const Places& places, int stride, float* keys, float* values) {
  load_keys<Stored>(places, pool.head_dim, keys);
  load_values<Stored>(places, to_values(pool), pool.head_dim, stride, values);
}

// Scales one row of scores, of which those outside low .. high are not seen; returns the highest, `top` included.
__attribute__((noinline)) float scale_scores(float* s, int low, int high, float scale, float top) {
  if (low <= 0 && high >= kKeyTile) {
    for (int k = 0; k < kKeyTile; ++k) s[k] *= scale;
  } else {
    for (int k = 0; k < kKeyTile; ++k) s[k] = k >= low && k < high ? s[k] * scale : kNone;
  }
  Lanes highest = spread(top);
  for (int k = 0; k < kKeyTile; k += kLanes) highest = larger(load(s + k), highest);
  for (int k = 0; k < kLanes; ++k) top = highest[k] > top ? highest[k] : top;
  return top;
}

// Scores become weights e^(s - top), those not seen 0; returns their sum.
__attribute__((noinline)) float exponentiate(float* s, float top) {
  Lanes sum = {};
  for (int k = 0; k < kKeyTile; k += kLanes) {
    const Lanes score = load(s + k), e = exponential(score - spread(top));
    const Lanes weight = score == spread(kNone) ? Lanes{} : e;
    save(s + k, weight);
    sum += weight;
  }
  return total_of(sum);
}

// The running softmax of one row after one more tile of scores, which become weights; what to keep of earlier sums is
// returned.
float soften(float* s, bool sees_keys, float top, float* highest, float* total) {
  if (top == kNone) {  // nothing seen yet, or no number
    if (sees_keys) *total = NAN;
    std::fill_n(s, kKeyTile, 0.0f);
    return 1.0f;
  }
  const float keep = *highest == top ? 1.0f : *highest == kNone ? 0.0f : fast_exp(*highest - top);
  *highest = top;
  *total = *total * keep + exponentiate(s, top);
  return keep;
}

int stride_of(const Call& c) { return (c.pool->head_dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

// Whole register blocks: large ones, then a small one where it holds the rest.
int padded_rows(const Call& c, int queries) {
  const int rows = queries * c.group(), rest = rows % kBlock;
  return rows - rest + (rest == 0 ? 0 : rest <= kSmallBlock ? kSmallBlock : kBlock);
}

int64_t num_floats(const Call& c, int queries) { return static_cast<int64_t>(padded_rows(c, queries)) * (stride_of(c) + 2); }

// A softmax in num_floats() floats at `memory`, over no keys yet.
Softmax empty_softmax(const Call& c, int queries, float* memory) {
  const int padded = padded_rows(c, queries);
  const int64_t cells = static_cast<int64_t>(padded) * stride_of(c);
  std::fill_n(memory, cells + 2 * padded, 0.0f);
  std::fill_n(memory + cells, padded, kNone);
  return {memory, memory + cells, memory + cells + padded};
}

// Of the piece's first query: its place in its request, and the first key that it sees.
int position_of(const Call& c, const Piece& p) {
  const int width = c.rows->query_starts[p.row + 1] - c.rows->query_starts[p.row];
  return c.rows->kv_lens[p.row] - width + p.first;
}
int oldest_key(const Call& c, const Piece& p) {
  return c.window > 0 ? std::max(0, position_of(c, p) - c.window + 1) : 0;
}

// The piece's part for one of its KV heads.
inline Piece one_head(const Piece& p, int h) {
  Piece one = p;
  one.kv_head += h;
  one.slot += h;
  one.kv_heads = 1;
  return one;
}

// Where query head r of the piece stands in q and out; padding repeats the last one.
inline int64_t place_of(const Call& c, const Piece& p, int r) {
  const int group = c.group();
  r = std::min(r, p.queries * group - 1);
  const int64_t token = c.rows->query_starts[p.row] + p.first + r / group;
  return (token * c.heads + static_cast<int64_t>(p.kv_head) * group + r % group) * c.pool->head_dim;
}

// The query heads of the piece's KV heads as rows `stride` floats apart, padding included.
const float* gather_queries(const Call& c, const Piece& p) {
  thread_local std::vector<float> memory;
  const int n = c.pool->head_dim, stride = stride_of(c), padded = padded_rows(c, p.queries);
  memory.resize(static_cast<size_t>(p.kv_heads) * padded * stride);
  float* to = memory.data();
  for (int h = 0; h < p.kv_heads; ++h) {
    const Piece one = one_head(p, h);
    for (int r = 0; r < padded; ++r, to += stride) std::copy_n(c.q + place_of(c, one, r), n, to);
  }
  return memory.data();
}

// One tile of keys and values as load_tile leaves them.
struct Tile {
  int first;
  int count;
  const float* keys;
  const float* values;
};

// Scores of query heads r .. r + rows over `count` keys from `first` on become weights; `keep` is for earlier sums.
template <int rows>
inline __attribute__((always_inline)) void weigh(const Call& c, const Piece& p, int first, int count, int r, float* scores,
                                                 const Softmax& part, float* keep) {
  float top[rows];
  bool sees_keys[rows];
  const int position0 = position_of(c, p) - first, last = p.queries * c.group() - 1;
  for (int b = 0; b < rows; ++b) {
    const int position = position0 + std::min(r + b, last) / c.group();
    const int low = c.window > 0 ? std::max(0, position - c.window + 1) : 0, high = std::min(count, position + 1);
    sees_keys[b] = low < high;
    top[b] = scale_scores(scores + b * kKeyTile, low, high, c.scale, part.highest[r + b]);
  }
  for (int b = 0; b < rows; ++b) {
    keep[b] = soften(scores + b * kKeyTile, sees_keys[b], top[b], part.highest + r + b, part.total + r + b);
  }
}

// Query heads r .. r + rows of the piece meet one tile of keys.
template <int dim, int rows>
inline __attribute__((always_inline)) void attend_block(const Call& c, const Piece& p, const Tile& tile, int r,
                                                        const float* q, const Softmax& part) {
  const int n = dim ? dim : c.pool->head_dim, stride = dim ? dim : stride_of(c);
  alignas(64) float scores[rows * kKeyTile];
  float keep[rows];
  for (int k = 0; k < kKeyTile; k += 2 * kLanes) {
    multiply_block<rows>(q + static_cast<int64_t>(r) * stride, stride, n, tile.keys + k, kKeyTile, scores + k, kKeyTile,
                         nullptr);
  }
  weigh<rows>(c, p, tile.first, tile.count, r, scores, part, keep);
  for (int i = 0; i < stride; i += 2 * kLanes) {
    multiply_block<rows>(scores, kKeyTile, kKeyTile, tile.values + i, stride,
                         part.acc + static_cast<int64_t>(r) * stride + i, stride, keep);
  }
}

// The same for the heads of a single query on one KV head, `shift` bytes behind the keys that `here` names. They are too
// few to pay for a copy of the tile: keys are turned in registers and values read in place. Every sum is made in the same
// order.
template <int dim, int rows, typename Stored>
__attribute__((noinline)) void attend_in_place(const Call& c, const Piece& p, int first, const Places& here, int64_t shift,
                                               const float* q, const Softmax& part, Ahead& ahead) {
  const int stride = dim ? dim : stride_of(c), n = dim ? dim : c.pool->head_dim;
  const int64_t to_value = to_values(*c.pool) + shift;
  static const Stored zeros[kMaxDim] = {};
  alignas(64) float scores[rows * kKeyTile] = {};
  const Stored* key[kKeyTile];
  for (int k = 0; k < kKeyTile; ++k) {
    key[k] = k < here.count ? reinterpret_cast<const Stored*>(here.keys[k] + shift) : zeros;
  }
  for (int i = 0; i < n; i += 2 * kLanes) {  // keys within: their sums do not wait for each other
    for (int k = 0; k < here.count; k += kLanes) {
      ahead.ask();
      Lanes columns[2 * kLanes], sums[rows];
      turn(key + k, i, columns);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) sums[r] = load(scores + r * kKeyTile + k);
#pragma GCC unroll 16
      for (int d = 0; d < 2 * kLanes; ++d) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) sums[r] = multiply_add(columns[d], spread(q[r * stride + i + d]), sums[r]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) save(scores + r * kKeyTile + k, sums[r]);
    }
  }
  float keep[rows];
  weigh<rows>(c, p, first, here.count, 0, scores, part, keep);
  for (int i = 0; i < n; i += 2 * kLanes) {
    Lanes sums[rows][2];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) sums[r][h] = load(part.acc + r * stride + i + h * kLanes) * keep[r];
      split(static_cast<const Stored*>(nullptr), sums[r]);
    }
    for (int k = 0; k < here.count; ++k) {
      if (k % kLanes == 0) ahead.ask();
      Lanes v[2];
      load_two(reinterpret_cast<const Stored*>(here.keys[k] + to_value) + i, v);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const Lanes weight = spread(scores[r * kKeyTile + k]);
        sums[r][0] = multiply_add(v[0], weight, sums[r][0]);
        sums[r][1] = multiply_add(v[1], weight, sums[r][1]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      join(static_cast<const Stored*>(nullptr), sums[r]);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) save(part.acc + r * stride + i + h * kLanes, sums[r][h]);
    }
  }
}

constexpr int kFewHeads = 4;  // of a query on one KV head

// Where a single query's tile is read in place: few heads, and whole vectors in a head; and only where multiply_add
// rounds once, whatever stands around it: elsewhere the compiler may sum the two forms in different orders.
bool reads_in_place(const Call& c, const Piece& p) {
#if defined(__AVX2__) && defined(__FMA__)
  constexpr bool kIsFused = true;
#else
  constexpr bool kIsFused = false;
#endif
  return kIsFused && p.queries == 1 && c.group() <= kFewHeads && c.pool->head_dim % (2 * kLanes) == 0;
}

template <int dim, typename Stored>
auto in_place(int rows) {
  switch (rows) {
    case 1: return attend_in_place<dim, 1, Stored>;
    case 2: return attend_in_place<dim, 2, Stored>;
    case 3: return attend_in_place<dim, 3, Stored>;
    default: return attend_in_place<dim, kFewHeads, Stored>;
  }
}

// The keys of a range that the piece's queries see: tiles begin at fixed places, and those that no query sees, which would
// change nothing, are left out.
int first_key(const Call& c, const Piece& p, int range) {
  return std::max(range * kRange, oldest_key(c, p) / kKeyTile * kKeyTile);
}
int end_of_keys(const Call& c, const Piece& p, int range) {
  return std::min((range + 1) * kRange, position_of(c, p) + p.queries);
}

void find_tile(const Call& c, const Piece& p, int first, int end, Places* places) {
  const int32_t* pages = c.rows->page_table + static_cast<int64_t>(p.row) * c.rows->max_pages;
  find_keys(*c.pool, pages, p.kv_head, first, std::min(kKeyTile, end - first), places);
}

// The softmax of all queries of the piece, gathered at `q`, over one range of keys of its KV head.
template <int dim>
__attribute__((noinline)) void attend_range(const Call& c, const Piece& p, int range, const float* q, const Softmax& part) {
  const int stride = stride_of(c), padded = padded_rows(c, p.queries);
  const int begin = first_key(c, p, range), end = end_of_keys(c, p, range);
  alignas(64) float keys[kMaxDim * kKeyTile];
  alignas(64) float values[kKeyTile * kMaxDim];
  Places places[2];
  auto find = [&](int k0) {
    find_tile(c, p, k0, end, &places[k0 / kKeyTile % 2]);
    prefetch(c, p, places[k0 / kKeyTile % 2], 0, kKeyTile);
  };
  find(begin);
  for (int k0 = begin; k0 < end; k0 += kKeyTile) {
    find(k0 + kKeyTile);
    const Places& here = places[k0 / kKeyTile % 2];
    const auto load_it = c.pool->type == KvType::kFloat ? load_tile<float> : load_tile<Bfloat>;
    load_it(*c.pool, here, stride, keys, values);
    const Tile tile{k0, here.count, keys, values};
    int r = 0;
    for (; r + kBlock <= padded; r += kBlock) attend_block<dim, kBlock>(c, p, tile, r, q, part);
    if (r < padded) attend_block<dim, kSmallBlock>(c, p, tile, r, q, part);
  }
}

// One query over one range of keys: the softmaxes of all KV heads of the piece, each in its slot. Heads lie side by side in a
// page, so all of them meet a tile before the next one, and memory is read in its own order. `after` is the piece that this
// thread is likely to do next, if there is one; its first keys are asked for.
template <int dim>
void decode_range(const Call& c, const Piece& p, float* slots, const Piece* after) {
  const int padded = padded_rows(c, 1);
  const int64_t size = num_floats(c, 1), q_size = static_cast<int64_t>(padded) * stride_of(c);
  const int64_t head_bytes = bytes_each(*c.pool) * c.pool->head_dim;
  const float* q = gather_queries(c, p);
  thread_local std::vector<Softmax> parts;
  parts.clear();
  for (int h = 0; h < p.kv_heads; ++h) parts.push_back(empty_softmax(c, 1, slots + (p.slot + h) * size));
  if (!reads_in_place(c, p)) {
    for (int h = 0; h < p.kv_heads; ++h) attend_range<dim>(c, one_head(p, h), p.range, q + h * q_size, parts[h]);
    return;
  }
  const bool is_float = c.pool->type == KvType::kFloat;
  const auto attend = is_float ? in_place<dim, float>(c.group()) : in_place<dim, Bfloat>(c.group());
  const int begin = first_key(c, p, p.range), end = end_of_keys(c, p, p.range);
  Places places[2];
  find_tile(c, p, begin, end, &places[0]);
  if (p.is_first) read_through(c, p, places[0]);
  Ahead ahead;
  int now = 0;
  for (int k0 = begin; k0 < end; k0 += kKeyTile, now = 1 - now) {
    Places& next = places[1 - now];
    const bool is_last = k0 + kKeyTile >= end;
    const Piece& of = is_last && after != nullptr ? *after : p;
    const int from = is_last && after != nullptr ? first_key(c, of, of.range) : k0 + kKeyTile;
    find_tile(c, of, from, end_of_keys(c, of, of.range), &next);
    const int blocks = (places[now].count + kLanes - 1) / kLanes;  // of keys, each asked at for scores and for values
    ahead.set(c, of, next, p.kv_heads * blocks * (c.pool->head_dim / kLanes));
    for (int h = 0; h < p.kv_heads; ++h) attend(c, p, k0, places[now], h * head_bytes, q + h * q_size, parts[h], ahead);
  }
}

// Adds the softmax over the next range of keys to the one over all before.
__attribute__((noinline)) void fold(int rows, int stride, const Softmax& part, const Softmax& whole) {
  for (int r = 0; r < rows; ++r) {
    if (part.total[r] == 0.0f) continue;  // saw no key of this range
    const float top = std::max(part.highest[r], whole.highest[r]);
    const float keep = whole.highest[r] == kNone ? 0.0f : fast_exp(whole.highest[r] - top);
    const float weight = fast_exp(part.highest[r] - top);
    whole.highest[r] = top;
    whole.total[r] = whole.total[r] * keep + part.total[r] * weight;
    float* out = whole.acc + static_cast<int64_t>(r) * stride;
    const float* in = part.acc + static_cast<int64_t>(r) * stride;
    for (int i = 0; i < stride; ++i) out[i] = out[i] * keep + in[i] * weight;
  }
}

__attribute__((noinline)) void finish(const Call& c, const Piece& p, const Softmax& whole) {
  const int n = c.pool->head_dim, stride = stride_of(c);
  for (int r = 0; r < p.queries * c.group(); ++r) {
    float* out = c.out + place_of(c, p, r);
    const float inverse = 1.0f / whole.total[r];
    for (int i = 0; i < n; ++i) out[i] = whole.acc[static_cast<int64_t>(r) * stride + i] * inverse;
  }
}

template <int dim>
void prefill_tile(const Call& c, const Piece& p) {
  thread_local std::vector<float> memory;
  const int64_t size = num_floats(c, p.queries);
  memory.resize(static_cast<size_t>(2 * size));
  const Softmax whole = empty_softmax(c, p.queries, memory.data());
  const float* q = gather_queries(c, p);
  const int last = (position_of(c, p) + p.queries - 1) / kRange;
  for (int range = oldest_key(c, p) / kRange; range <= last; ++range) {
    const Softmax part = empty_softmax(c, p.queries, memory.data() + size);
    attend_range<dim>(c, p, range, q, part);
    fold(p.queries * c.group(), stride_of(c), part, whole);
  }
  finish(c, p, whole);
}

// The ranges of one query and KV head, which stand in `num_slots` slots, `step` apart.
void merge(const Call& c, const Piece& p, int num_slots, int step, float* slots) {
  thread_local std::vector<float> memory;
  const int64_t size = num_floats(c, 1);
  memory.resize(static_cast<size_t>(size));
  const Softmax whole = empty_softmax(c, 1, memory.data());
  const int padded = padded_rows(c, 1);
  for (int s = 0; s < num_slots; ++s) {
    float* at = slots + static_cast<int64_t>(p.slot + s * step) * size;
    const int64_t cells = static_cast<int64_t>(padded) * stride_of(c);
    fold(c.group(), stride_of(c), {at, at + cells, at + cells + padded}, whole);
  }
  finish(c, p, whole);
}

struct Merge {
  Piece piece;  // the query's first
  int num_slots;
  int step;
};

template <int dim>
void run(const Call& c, const std::vector<Piece>& pieces, const std::vector<Merge>& merges, int num_slots) {
  static thread_local std::vector<float> slots;
  const int64_t size = num_floats(c, 1);
  slots.resize(static_cast<size_t>(num_slots * size));
  float* all = slots.data();
  const int threads = team().size();
  auto work = [&](int chunk) {
    const Piece& p = pieces[chunk];
    if (p.slot < 0) return prefill_tile<dim>(c, p);
    const size_t next = static_cast<size_t>(chunk) + threads;
    const Piece* after = next < pieces.size() && pieces[next].slot >= 0 ? &pieces[next] : nullptr;
    decode_range<dim>(c, p, all, after);
  };
  team().run(static_cast<int>(pieces.size()), work);
  constexpr int kMergesAtOnce = 16;
  const int num_merges = static_cast<int>(merges.size());
  auto merge_some = [&](int chunk) {
    for (int i = chunk * kMergesAtOnce; i < std::min(num_merges, (chunk + 1) * kMergesAtOnce); ++i) {
      merge(c, merges[i].piece, merges[i].num_slots, merges[i].step, all);
    }
  };
  team().run((num_merges + kMergesAtOnce - 1) / kMergesAtOnce, merge_some);
}

// KV heads of a decode piece: all of them, which lie side by side, unless threads of the team would go without a piece.
int heads_at_once(const Call& c) {
  int num_ranges = 0;
  for (int row = 0; row < c.rows->num_rows; ++row) {
    if (c.rows->query_starts[row + 1] - c.rows->query_starts[row] != 1) continue;
    const int length = c.rows->kv_lens[row], seen = c.window > 0 ? std::min(c.window, length) : length;
    num_ranges += (seen + kRange - 1) / kRange;
  }
  return num_ranges < team().size() ? 1 : c.pool->kv_heads;
}

}  // namespace

void attention(const float* q, const Pool& pool, const Rows& rows, int heads, int window, float scale, float* out) {
  const Call c{q, &pool, &rows, heads, window, scale, out};
  static thread_local std::vector<Piece> pieces;
  static thread_local std::vector<Merge> merges;
  pieces.clear();
  merges.clear();
  int num_slots = 0;
  const int at_once = heads_at_once(c);
  for (int row = 0; row < rows.num_rows; ++row) {
    const int width = rows.query_starts[row + 1] - rows.query_starts[row];
    for (int head = 0; head < pool.kv_heads && width != 1; ++head) {
      for (int q0 = 0; q0 < width; q0 += kQueryTile) pieces.push_back({row, head, q0, std::min(kQueryTile, width - q0), 0, -1});
    }
    for (int head = 0; head < pool.kv_heads && width == 1; head += at_once) {
      const Piece first{row, head, 0, 1, 0, num_slots, std::min(at_once, pool.kv_heads - head)};
      const int from = oldest_key(c, first) / kRange, last = position_of(c, first) / kRange;
      for (int range = from; range <= last; ++range, num_slots += first.kv_heads) {
        const bool is_first = pieces.size() < static_cast<size_t>(team().size());
        pieces.push_back({row, head, 0, 1, range, num_slots, first.kv_heads, is_first});
      }
      for (int h = 0; h < first.kv_heads; ++h) merges.push_back({one_head(first, h), last - from + 1, first.kv_heads});
    }
  }
  switch (pool.head_dim) {
    case 32: return run<32>(c, pieces, merges, num_slots);
    case 64: return run<64>(c, pieces, merges, num_slots);
    case 128: return run<128>(c, pieces, merges, num_slots);
    default: return run<0>(c, pieces, merges, num_slots);
  }
}

}  // namespace polypath
