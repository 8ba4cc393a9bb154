// See ops.h. Plain loops that the compiler vectorizes for each ISA.
#include "ops.h"

#include <algorithm>
#include <cmath>

#include "best.h"
#include "lanes.h"
#include "numbers.h"
#include "team.h"

namespace polypath {
namespace {

// Splits rows so that small batches stay on the calling thread.
template <typename Row>
void for_each_row(int rows, int64_t floats_per_row, const Row& row) {
  const int at_once = static_cast<int>(std::clamp<int64_t>(16384 / std::max<int64_t>(1, floats_per_row), 1, 64));
  auto work = [&](int chunk) {
    for (int r = chunk * at_once; r < std::min(rows, (chunk + 1) * at_once); ++r) row(r);
  };
  team().run((rows + at_once - 1) / at_once, work);
}

void normalize(const float* x, const float* weight, float eps, int width, float* y) {
  float squares = 0.0f;
  for (int i = 0; i < width; ++i) squares += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
  for (int i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
}

void rotate(const float* x, const float* cos, const float* sin, int half, float* y) {
  for (int i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    y[i] = first * cos[i] - second * sin[i];
    y[i + half] = second * cos[i] + first * sin[i];
  }
}

void put(const Pool& pool, int64_t slot, int value, int head, const float* from) {
  const int64_t page = slot / pool.page_size, offset = slot % pool.page_size;
  const int64_t at =
      (((page * 2 + value) * pool.page_size + offset) * pool.kv_heads + head) * static_cast<int64_t>(pool.head_dim);
  if (pool.type == KvType::kFloat) {
    std::copy_n(from, pool.head_dim, static_cast<float*>(pool.data) + at);
  } else {
    uint16_t* to = static_cast<uint16_t*>(pool.data) + at;
    for (int i = 0; i < pool.head_dim; ++i) to[i] = float_to_bfloat(from[i]);
  }
}

constexpr int kPiece = 8192;  // numbers of one chunk of an argmax

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int rows, int width, float* y) {
  for_each_row(rows, width, [&](int r) {
    const int64_t at = static_cast<int64_t>(r) * width;
    normalize(x + at, weight, eps, width, y + at);
  });
}

void add_rms_norm(const float* x, const float* residual, const float* weight, float eps, int rows, int width, float* y,
                  float* total) {
  for_each_row(rows, 2 * width, [&](int r) {
    const int64_t at = static_cast<int64_t>(r) * width;
    for (int i = 0; i < width; ++i) total[at + i] = x[at + i] + residual[at + i];
    normalize(total + at, weight, eps, width, y + at);
  });
}

void silu_mul(const float* gate_up, int rows, int width, float* y) {
  for_each_row(rows, 4 * width, [&](int r) {
    const float* gate = gate_up + static_cast<int64_t>(r) * 2 * width;
    const float* up = gate + width;
    float* out = y + static_cast<int64_t>(r) * width;
    int i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const Lanes x = load(gate + i);
      save(out + i, x / (exponential(-x) + 1.0f) * load(up + i));
    }
    for (; i < width; ++i) out[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
  });
}

void rope_store(const float* qkv, const float* cos, const float* sin, const float* q_norm, const float* k_norm, float eps,
                const Pool& pool, const int64_t* slots, int rows, int heads, float* q) {
  const int dim = pool.head_dim, half = dim / 2;
  const int64_t width = static_cast<int64_t>(heads + 2 * pool.kv_heads) * dim;
  for_each_row(rows, 2 * width, [&](int r) {
    const float* row = qkv + r * width;
    const float* c = cos + static_cast<int64_t>(r) * half;
    const float* s = sin + static_cast<int64_t>(r) * half;
    float normed[1024], turned[1024];
    for (int h = 0; h < heads; ++h) {
      const float* from = row + static_cast<int64_t>(h) * dim;
      if (q_norm != nullptr) normalize(from, q_norm, eps, dim, normed), from = normed;
      rotate(from, c, s, half, q + (static_cast<int64_t>(r) * heads + h) * dim);
    }
    for (int h = 0; h < pool.kv_heads; ++h) {
      const float* from = row + static_cast<int64_t>(heads + h) * dim;
      if (k_norm != nullptr) normalize(from, k_norm, eps, dim, normed), from = normed;
      rotate(from, c, s, half, turned);
      put(pool, slots[r], 0, h, turned);
      put(pool, slots[r], 1, h, row + static_cast<int64_t>(heads + pool.kv_heads + h) * dim);
    }
  });
}

void argmax(const float* x, int rows, int width, int64_t* index) {
  const int pieces = (width + kPiece - 1) / kPiece;
  Best best(x, rows, width);
  best.split(pieces);
  auto work = [&](int chunk) {
    const int first = chunk % pieces * kPiece;
    best.note(chunk / pieces, chunk % pieces, first, std::min(width, first + kPiece));
  };
  constexpr int kFewRows = 4;  // up to here waking the team takes longer than the work
  if (rows <= kFewRows) {
    for (int chunk = 0; chunk < rows * pieces; ++chunk) work(chunk);
  } else {
    team().run(rows * pieces, work);
  }
  best.finish(index);
}

}  // namespace polypath
