// See attention.h. Decode: one pass over the keys for all query heads of a KV head, keys split into fixed ranges that
// are merged at the end. Prefill: tiles of queries against tiles of keys with a running softmax (Dao et al. 2022).
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

constexpr int kSplit = 256;       // keys of one decode chunk; fixed, so results do not depend on the batch
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

template <int dim>
inline float dot(const float* a, const float* b, int n) {
  float total = 0.0f;
  for (int i = 0; i < (dim ? dim : n); ++i) total += a[i] * b[i];
  return total;
}

template <int dim>
inline void add_scaled(float* out, float scale, const float* v, int n) {
  for (int i = 0; i < (dim ? dim : n); ++i) out[i] += scale * v[i];
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

// One chunk of work. `split` counts ranges of keys (decode) or tiles of queries (prefill) of a row.
struct Piece {
  int row;
  int kv_head;
  int split;
  int num_splits;
  int slot;  // of the first split's partial result, for decode rows with more than one
};

// Softmax so far of one query head over some keys: values are scaled by e^-highest.
struct Partial {
  float highest;
  float total;
};

template <int dim>
void decode_range(const Call& c, const Piece& p, float* acc, Partial* partials) {
  const int n = c.pool->head_dim, group = c.group(), len = c.rows->kv_lens[p.row];
  const int32_t* pages = c.rows->page_table + static_cast<int64_t>(p.row) * c.rows->max_pages;
  const int oldest = c.window > 0 ? std::max(0, len - c.window) : 0;
  const int first = std::max(oldest, p.split * kSplit), last = std::min(len, (p.split + 1) * kSplit);
  const int64_t token = c.rows->query_starts[p.row];
  const float* q = c.q + (token * c.heads + static_cast<int64_t>(p.kv_head) * group) * n;
  float scores[kSplit], buffer[kMaxDim];
  std::fill_n(acc, static_cast<int64_t>(group) * n, 0.0f);
  thread_local std::vector<float> all;
  all.resize(static_cast<size_t>(group) * kSplit);
  for (int k = first; k < last; ++k) {
    const float* key = vector_at(*c.pool, pages, k, 0, p.kv_head, buffer);
    for (int g = 0; g < group; ++g) all[g * kSplit + k - first] = dot<dim>(q + static_cast<int64_t>(g) * n, key, n) * c.scale;
  }
  const int count = std::max(0, last - first);
  for (int g = 0; g < group; ++g) {
    float* s = all.data() + static_cast<int64_t>(g) * kSplit;
    float highest = kNone;
    for (int k = 0; k < count; ++k) highest = s[k] > highest ? s[k] : highest;
    float total = 0.0f;
    for (int k = 0; k < count; ++k) scores[k] = fast_exp(s[k] - highest);
    for (int k = 0; k < count; ++k) total += scores[k];
    std::copy_n(scores, count, s);
    partials[g] = {highest, total};
  }
  for (int k = first; k < last; ++k) {
    const float* value = vector_at(*c.pool, pages, k, 1, p.kv_head, buffer);
    for (int g = 0; g < group; ++g) add_scaled<dim>(acc + static_cast<int64_t>(g) * n, all[g * kSplit + k - first], value, n);
  }
}

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

// Keys first .. first + count of one KV head as columns [dim][kKeyTile], values as rows [kKeyTile][stride]; what is
// missing is zero, and `stride` is the head dimension rounded up to whole blocks.
void load_tile(const Call& c, const Piece& p, int first, int count, int stride, float* keys, float* values) {
  const int n = c.pool->head_dim;
  const int32_t* pages = c.rows->page_table + static_cast<int64_t>(p.row) * c.rows->max_pages;
  float buffer[kMaxDim];
  for (int k = 0; k < kKeyTile; ++k) {
    float* row = values + static_cast<int64_t>(k) * stride;
    if (k >= count) {
      for (int i = 0; i < n; ++i) keys[i * kKeyTile + k] = 0.0f;
      std::fill_n(row, stride, 0.0f);
      continue;
    }
    const float* key = vector_at(*c.pool, pages, first + k, 0, p.kv_head, buffer);
    for (int i = 0; i < n; ++i) keys[i * kKeyTile + k] = key[i];
    std::copy_n(vector_at(*c.pool, pages, first + k, 1, p.kv_head, buffer), n, row);
    std::fill_n(row + n, stride - n, 0.0f);
  }
}

// The running softmax of one row over one tile of scores, which become weights; what to keep of earlier sums is returned.
float soften(float* s, int low, int high, float scale, float* highest, float* total) {
  float top = *highest;
  for (int k = 0; k < kKeyTile; ++k) s[k] = k >= low && k < high ? s[k] * scale : kNone;
  for (int k = 0; k < kKeyTile; ++k) top = s[k] > top ? s[k] : top;
  if (top == kNone) {  // nothing seen yet
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

template <int dim>
void prefill_tile(const Call& c, const Piece& p) {
  const int n = c.pool->head_dim, group = c.group(), len = c.rows->kv_lens[p.row];
  const int stride = (n + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
  const int start = c.rows->query_starts[p.row], width = c.rows->query_starts[p.row + 1] - start;
  const int q0 = p.split * kQueryTile, queries = std::min(kQueryTile, width - q0);
  const int position0 = len - width + q0;  // of the tile's first query
  const int rows = queries * group, padded = (rows + kBlock - 1) / kBlock * kBlock;
  thread_local std::vector<float> memory;
  memory.assign(static_cast<size_t>(padded) * (stride + 2), 0.0f);
  float* acc = memory.data();
  float* highest = acc + static_cast<int64_t>(padded) * stride;
  float* total = highest + padded;
  std::fill_n(highest, padded, kNone);
  alignas(64) float keys[kMaxDim * kKeyTile];
  alignas(64) float values[kKeyTile * kMaxDim];
  alignas(64) float scores[kBlock][kKeyTile];
  float* const score_rows[kBlock] = {scores[0], scores[1], scores[2], scores[3]};
  auto row_of = [&](int64_t r) {  // of queries and outputs; padding repeats the last row
    r = std::min<int64_t>(r, rows - 1);
    return ((start + q0 + r / group) * c.heads + p.kv_head * group + r % group) * n;
  };
  // Tiles of keys begin at fixed places, so that a query's result does not depend on how its prompt was cut.
  const int first_key = c.window > 0 ? std::max(0, position0 - c.window + 1) / kKeyTile * kKeyTile : 0;
  for (int k0 = first_key; k0 < position0 + queries; k0 += kKeyTile) {
    const int count = std::min(kKeyTile, position0 + queries - k0);
    load_tile(c, p, k0, count, stride, keys, values);
    for (int r = 0; r < padded; r += kBlock) {
      const float* q[kBlock];
      float* out[kBlock];
      float keep[kBlock];
      for (int b = 0; b < kBlock; ++b) q[b] = c.q + row_of(r + b), out[b] = acc + static_cast<int64_t>(r + b) * stride;
      for (int k = 0; k < kKeyTile; k += 2 * kLanes) {
        float* const at[kBlock] = {score_rows[0] + k, score_rows[1] + k, score_rows[2] + k, score_rows[3] + k};
        multiply_block(q, dim ? dim : n, keys + k, kKeyTile, at, nullptr);
      }
      for (int b = 0; b < kBlock; ++b) {
        const int position = position0 + std::min(r + b, rows - 1) / group;
        const int low = c.window > 0 ? position - c.window + 1 - k0 : 0;
        keep[b] = soften(scores[b], low, std::min(count, position + 1 - k0), c.scale, highest + r + b, total + r + b);
      }
      for (int i = 0; i < stride; i += 2 * kLanes) {
        float* const at[kBlock] = {out[0] + i, out[1] + i, out[2] + i, out[3] + i};
        multiply_block(score_rows, kKeyTile, values + i, stride, at, keep);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    float* out = c.out + row_of(r);
    const float inverse = 1.0f / total[r];
    for (int i = 0; i < n; ++i) out[i] = acc[static_cast<int64_t>(r) * stride + i] * inverse;
  }
}

// Weighs the ranges of one decode row and KV head by e^(their highest - the highest of all).
void merge(const Call& c, const Piece& p, const float* acc, const Partial* partials) {
  const int n = c.pool->head_dim, group = c.group();
  const int64_t token = c.rows->query_starts[p.row];
  for (int g = 0; g < group; ++g) {
    float highest = kNone, total = 0.0f;
    for (int s = 0; s < p.num_splits; ++s) highest = std::max(highest, partials[s * group + g].highest);
    float* out = c.out + (token * c.heads + static_cast<int64_t>(p.kv_head) * group + g) * n;
    std::fill_n(out, n, 0.0f);
    for (int s = 0; s < p.num_splits; ++s) {
      const Partial& part = partials[s * group + g];
      if (part.total == 0.0f) continue;
      const float weight = fast_exp(part.highest - highest);
      total += weight * part.total;
      add_scaled<0>(out, weight, acc + (static_cast<int64_t>(s) * group + g) * n, n);
    }
    for (int i = 0; i < n; ++i) out[i] /= total;
  }
}

template <int dim>
void run(const Call& c, const std::vector<Piece>& pieces, const std::vector<Piece>& decodes, int num_slots) {
  const int n = c.pool->head_dim, group = c.group();
  static thread_local std::vector<float> acc;
  static thread_local std::vector<Partial> partials;
  acc.resize(static_cast<size_t>(num_slots) * group * n);
  partials.resize(static_cast<size_t>(num_slots) * group);
  float* all_acc = acc.data();
  Partial* all_partials = partials.data();
  auto work = [&](int chunk) {
    const Piece& p = pieces[chunk];
    if (p.slot < 0) return prefill_tile<dim>(c, p);
    const int64_t slot = p.slot + p.split;
    decode_range<dim>(c, p, all_acc + slot * group * n, all_partials + slot * group);
    if (p.num_splits == 1) merge(c, p, all_acc + slot * group * n, all_partials + slot * group);
  };
  team().run(static_cast<int>(pieces.size()), work);
  for (const Piece& p : decodes) {
    if (p.num_splits > 1) {
      merge(c, p, all_acc + static_cast<int64_t>(p.slot) * group * n, all_partials + static_cast<int64_t>(p.slot) * group);
    }
  }
}

}  // namespace

void attention(const float* q, const Pool& pool, const Rows& rows, int heads, int window, float scale, float* out) {
  const Call c{q, &pool, &rows, heads, window, scale, out};
  static thread_local std::vector<Piece> pieces, decodes;
  pieces.clear();
  decodes.clear();
  int num_slots = 0;
  for (int row = 0; row < rows.num_rows; ++row) {
    const int width = rows.query_starts[row + 1] - rows.query_starts[row];
    const bool is_decode = width == 1;
    const int splits = is_decode ? std::max(1, (rows.kv_lens[row] + kSplit - 1) / kSplit) : (width + kQueryTile - 1) / kQueryTile;
    for (int head = 0; head < pool.kv_heads; ++head) {
      const int slot = is_decode ? num_slots : -1;
      for (int s = 0; s < splits; ++s) pieces.push_back({row, head, s, splits, slot});
      if (is_decode) {
        decodes.push_back({row, head, 0, splits, slot});
        num_slots += splits;
      }
    }
  }
  switch (pool.head_dim) {
    case 32: return run<32>(c, pieces, decodes, num_slots);
    case 64: return run<64>(c, pieces, decodes, num_slots);
    case 128: return run<128>(c, pieces, decodes, num_slots);
    default: return run<0>(c, pieces, decodes, num_slots);
  }
}

}  // namespace polypath
