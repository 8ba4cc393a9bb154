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

constexpr int kRange = 256;       // keys of one running softmax; fixed, so results do not depend on the batch
constexpr int kQueryTile = 32;    // queries of one prefill chunk
constexpr int kKeyTile = 32;      // keys whose transposed copy stays in the first-level cache
constexpr int kMaxDim = 256;
constexpr int kBlock = 4;         // rows of a register block, 2 x 8 columns wide
constexpr float kNone = -std::numeric_limits<float>::infinity();

// A key or value vector as floats; `buffer` is used when the pool holds bfloat16.
inline const float* vector_at(const Pool& pool, const int32_t* pages, int token, int value, int head, float* buffer) {
  const int64_t page = pages[token / pool.page_size], offset = token % pool.page_size;
  const int64_t at =
      (((page * 2 + value) * pool.page_size + offset) * pool.kv_heads + head) * static_cast<int64_t>(pool.head_dim);
  if (pool.type == KvType::kFloat) return static_cast<const float*>(pool.data) + at;
  const uint16_t* from = static_cast<const uint16_t*>(pool.data) + at;
  for (int i = 0; i < pool.head_dim; ++i) buffer[i] = bfloat_to_float(from[i]);
  return buffer;
}

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

// One chunk of work: queries first .. first + queries of a row's step, and one KV head. Decode pieces read one range of
// keys into their slot, prefill pieces (slot -1) all of them.
struct Piece {
  int row;
  int kv_head;
  int first;
  int queries;
  int range;
  int slot;
};

// Softmax so far of some query heads over some keys: values are scaled by e^-highest.
struct Softmax {
  float* acc;      // [rows, stride]
  float* highest;  // [rows]
  float* total;    // [rows]
};

// c[4][16] = c * keep + a[4][depth] b[depth][16], all sums in registers. Rows of a are given one by one.
inline __attribute__((always_inline)) void multiply_block(const float* const* a, int depth, const float* b, int b_stride,
                                                          float* const* c, const float* keep) {
  Lanes sums[kBlock][2];
  for (int r = 0; r < kBlock; ++r) {
    for (int h = 0; h < 2; ++h) sums[r][h] = keep == nullptr ? Lanes{} : load(c[r] + h * kLanes) * keep[r];
  }
  for (int i = 0; i < depth; ++i) {
    const Lanes b0 = load(b + static_cast<int64_t>(i) * b_stride), b1 = load(b + static_cast<int64_t>(i) * b_stride + kLanes);
    for (int r = 0; r < kBlock; ++r) {
      sums[r][0] += b0 * a[r][i];
      sums[r][1] += b1 * a[r][i];
    }
  }
  for (int r = 0; r < kBlock; ++r) {
    for (int h = 0; h < 2; ++h) save(c[r] + h * kLanes, sums[r][h]);
  }
}

// Rows of 8 floats, in[0..8), as columns of `out`, whose rows are `stride` apart.
inline void transpose(const float* const* in, float* out, int stride) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(in[i]);
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
    _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 8; ++k) out[i * stride + k] = in[k][i];
  }
#endif
}

// Keys first .. first + count of one KV head as columns [dim][kKeyTile]; what is missing is zero.
void load_keys(const Call& c, const int32_t* pages, int kv_head, int first, int count, float* keys) {
  static const float zeros[kMaxDim] = {};
  const int n = c.pool->head_dim;
  float buffers[kLanes][kMaxDim];
  for (int k0 = 0; k0 < kKeyTile; k0 += kLanes) {
    const float* key[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const int k = k0 + j;
      key[j] = k < count ? vector_at(*c.pool, pages, first + k, 0, kv_head, buffers[j]) : zeros;
    }
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const float* at[kLanes];
      for (int j = 0; j < kLanes; ++j) at[j] = key[j] + i;
      transpose(at, keys + i * kKeyTile + k0, kKeyTile);
    }
    for (; i < n; ++i) {
      for (int j = 0; j < kLanes; ++j) keys[i * kKeyTile + k0 + j] = key[j][i];
    }
  }
}

// Their values as rows [kKeyTile][stride]; what is missing is zero.
void load_values(const Call& c, const int32_t* pages, int kv_head, int first, int count, int stride, float* values) {
  const int n = c.pool->head_dim;
  float buffer[kMaxDim];
  for (int k = 0; k < count; ++k) {
    float* row = values + static_cast<int64_t>(k) * stride;
    std::copy_n(vector_at(*c.pool, pages, first + k, 1, kv_head, buffer), n, row);
    std::fill_n(row + n, stride - n, 0.0f);
  }
  std::fill_n(values + static_cast<int64_t>(count) * stride, static_cast<int64_t>(kKeyTile - count) * stride, 0.0f);
}

// The running softmax of one row over one tile of scores, which become weights; what to keep of earlier sums is returned.
float soften(float* s, int low, int high, float scale, float* highest, float* total) {
  float top = *highest;
  for (int k = 0; k < kKeyTile; ++k) s[k] = k >= low && k < high ? s[k] * scale : kNone;
  for (int k = 0; k < kKeyTile; ++k) top = s[k] > top ? s[k] : top;
  if (top == kNone) {  // nothing seen yet, or no number
    if (std::max(low, 0) < std::min(high, kKeyTile)) *total = NAN;
    std::fill_n(s, kKeyTile, 0.0f);
    return 1.0f;
  }
  float sum = 0.0f;
  for (int k = 0; k < kKeyTile; ++k) s[k] = s[k] == kNone ? 0.0f : fast_exp(s[k] - top);
  for (int k = 0; k < kKeyTile; ++k) sum += s[k];
  const float keep = *highest == kNone ? 0.0f : fast_exp(*highest - top);
  *highest = top;
  *total = *total * keep + sum;
  return keep;
}

int stride_of(const Call& c) { return (c.pool->head_dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }
int padded_rows(const Call& c, int queries) { return (queries * c.group() + kBlock - 1) / kBlock * kBlock; }
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

// Where query head r of the piece stands in q and out; padding repeats the last one.
inline int64_t place_of(const Call& c, const Piece& p, int r) {
  const int group = c.group();
  r = std::min(r, p.queries * group - 1);
  const int64_t token = c.rows->query_starts[p.row] + p.first + r / group;
  return (token * c.heads + static_cast<int64_t>(p.kv_head) * group + r % group) * c.pool->head_dim;
}

// The softmax of all queries of the piece over one range of keys.
template <int dim>
__attribute__((noinline)) void attend_range(const Call& c, const Piece& p, int range, const Softmax& part) {
  const int n = c.pool->head_dim, stride = stride_of(c), group = c.group();
  const int padded = padded_rows(c, p.queries), rows = p.queries * group, position0 = position_of(c, p);
  const int32_t* pages = c.rows->page_table + static_cast<int64_t>(p.row) * c.rows->max_pages;
  alignas(64) float keys[kMaxDim * kKeyTile];
  alignas(64) float values[kKeyTile * kMaxDim];
  alignas(64) float scores[kBlock][kKeyTile];
  float* const score_rows[kBlock] = {scores[0], scores[1], scores[2], scores[3]};
  // Tiles of keys begin at fixed places too; those that no query sees change nothing and are left out.
  const int begin = std::max(range * kRange, oldest_key(c, p) / kKeyTile * kKeyTile);
  const int end = std::min((range + 1) * kRange, position0 + p.queries);
  for (int k0 = begin; k0 < end; k0 += kKeyTile) {
    const int count = std::min(kKeyTile, end - k0);
    load_keys(c, pages, p.kv_head, k0, count, keys);
    load_values(c, pages, p.kv_head, k0, count, stride, values);
    for (int r = 0; r < padded; r += kBlock) {
      const float* q[kBlock];
      float* out[kBlock];
      float keep[kBlock];
      for (int b = 0; b < kBlock; ++b) q[b] = c.q + place_of(c, p, r + b), out[b] = part.acc + static_cast<int64_t>(r + b) * stride;
      for (int k = 0; k < kKeyTile; k += 2 * kLanes) {
        float* const at[kBlock] = {score_rows[0] + k, score_rows[1] + k, score_rows[2] + k, score_rows[3] + k};
        multiply_block(q, dim ? dim : n, keys + k, kKeyTile, at, nullptr);
      }
      for (int b = 0; b < kBlock; ++b) {
        const int position = position0 + std::min(r + b, rows - 1) / group;
        const int low = c.window > 0 ? position - c.window + 1 - k0 : 0;
        keep[b] = soften(scores[b], low, std::min(count, position + 1 - k0), c.scale, part.highest + r + b, part.total + r + b);
      }
      for (int i = 0; i < stride; i += 2 * kLanes) {
        float* const at[kBlock] = {out[0] + i, out[1] + i, out[2] + i, out[3] + i};
        multiply_block(score_rows, kKeyTile, values + i, stride, at, keep);
      }
    }
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
  const int last = (position_of(c, p) + p.queries - 1) / kRange;
  for (int range = oldest_key(c, p) / kRange; range <= last; ++range) {
    const Softmax part = empty_softmax(c, p.queries, memory.data() + size);
    attend_range<dim>(c, p, range, part);
    fold(p.queries * c.group(), stride_of(c), part, whole);
  }
  finish(c, p, whole);
}

// The ranges of one query, which stand in `num_slots` slots of `slots`.
void merge(const Call& c, const Piece& p, int num_slots, const float* slots) {
  thread_local std::vector<float> memory;
  const int64_t size = num_floats(c, 1);
  memory.resize(static_cast<size_t>(size));
  const Softmax whole = empty_softmax(c, 1, memory.data());
  const int padded = padded_rows(c, 1);
  for (int s = 0; s < num_slots; ++s) {
    float* at = const_cast<float*>(slots) + s * size;
    const int64_t cells = static_cast<int64_t>(padded) * stride_of(c);
    fold(c.group(), stride_of(c), {at, at + cells, at + cells + padded}, whole);
  }
  finish(c, p, whole);
}

struct Merge {
  Piece piece;  // any of the query's
  int num_slots;
};

template <int dim>
void run(const Call& c, const std::vector<Piece>& pieces, const std::vector<Merge>& merges, int num_slots) {
  static thread_local std::vector<float> slots;
  const int64_t size = num_floats(c, 1);
  slots.resize(static_cast<size_t>(num_slots * size));
  float* all = slots.data();
  auto work = [&](int chunk) {
    const Piece& p = pieces[chunk];
    if (p.slot < 0) return prefill_tile<dim>(c, p);
    attend_range<dim>(c, p, p.range, empty_softmax(c, 1, all + p.slot * size));
  };
  team().run(static_cast<int>(pieces.size()), work);
  for (const Merge& m : merges) merge(c, m.piece, m.num_slots, all + m.piece.slot * size);
}

}  // namespace

void attention(const float* q, const Pool& pool, const Rows& rows, int heads, int window, float scale, float* out) {
  const Call c{q, &pool, &rows, heads, window, scale, out};
  static thread_local std::vector<Piece> pieces;
  static thread_local std::vector<Merge> merges;
  pieces.clear();
  merges.clear();
  int num_slots = 0;
  for (int row = 0; row < rows.num_rows; ++row) {
    const int width = rows.query_starts[row + 1] - rows.query_starts[row];
    for (int head = 0; head < pool.kv_heads; ++head) {
      if (width != 1) {
        for (int q0 = 0; q0 < width; q0 += kQueryTile) pieces.push_back({row, head, q0, std::min(kQueryTile, width - q0), 0, -1});
        continue;
      }
      const Piece first{row, head, 0, 1, 0, num_slots};
      for (int range = oldest_key(c, first) / kRange; range <= position_of(c, first) / kRange; ++range) {
        pieces.push_back({row, head, 0, 1, range, num_slots++});
      }
      merges.push_back({first, num_slots - first.slot});
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
