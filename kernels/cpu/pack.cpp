// Weights into blocks of 8 interleaved rows: GGUF's own block formats as they are, where ours can hold them, else by
// rounding what they stand for.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear.h"
#include "numbers.h"
#include "pack.h"
#include "team.h"

namespace polypath {
namespace {

constexpr int kLevels = 15;  // steps of 4 bits

struct Group4 {  // w = d * q + m
  uint8_t q[kGroup];
  uint16_t d, m;
};

struct Group8 {  // w = d * q
  int8_t q[kGroup];
  uint16_t d;
};

// Four bytes at once, wherever they lie.
inline uint32_t read_word(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return word;
}

inline void write_word(void* to, uint32_t word) { std::memcpy(to, &word, 4); }

// The 16 bytes of a Q4_0 or Q4_1 block, byte j with inputs j and 16 + j, as row r of a block's `q`.
inline void put_nibbles(uint8_t* q, int r, const uint8_t* from) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int c = 0; c < 2; ++c) {
    const uint32_t left = read_word(from + 8 * c), right = read_word(from + 8 * c + 4);
    write_word(q + 32 * c + 4 * r, (left & kLow) | (right & kLow) << 4);
    write_word(q + 64 + 32 * c + 4 * r, (left >> 4 & kLow) | (right & ~kLow));
  }
}

void put(Int4Block& b, int r, const Group4& group) {
  for (int i = 0; i < kGroup; ++i) {
    uint8_t& byte = b.q[32 * (i / 8) + 4 * r + i % 4];
    const uint8_t q = group.q[i];
    byte = static_cast<uint8_t>(i % 8 < 4 ? (byte & 0xf0) | q : (byte & 0x0f) | (q << 4));
  }
  b.d[r] = group.d;
  b.m[r] = group.m;
}

void put(Int8Block& b, int r, const Group8& group) {
  for (int i = 0; i < kGroup; i += 4) std::memcpy(b.q + 8 * i + 4 * r, group.q + i, 4);
  b.d[r] = group.d;
}

struct Line {  // w = step * q + base
  float step, base;
};

inline float level(float w, float base, float inverse) {
  const float v = (w - base) * inverse;
  return static_cast<float>(static_cast<int>(std::min(std::max(v, 0.0f), static_cast<float>(kLevels)) + 0.5f));
}

// The line of least squares through the levels that `from` gives the weights; `error` becomes the sum of squared errors.
Line fit(const float* w, float sum_w, float sum_ww, Line from, float* error) {
  const float inverse = 1.0f / from.step;
  float sum_q = 0.0f, sum_qq = 0.0f, sum_qw = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float q = level(w[i], from.base, inverse);
    sum_q += q;
    sum_qq += q * q;
    sum_qw += q * w[i];
  }
  const float spread = kGroup * sum_qq - sum_q * sum_q;
  if (spread > 0.0f) {
    from.step = (kGroup * sum_qw - sum_q * sum_w) / spread;
    from.base = (sum_w - from.step * sum_q) / kGroup;
  }
  const float d = from.step, m = from.base;
  *error = sum_ww + d * (d * sum_qq - 2.0f * sum_qw) + m * (2.0f * d * sum_q - 2.0f * sum_w + kGroup * m);
  return from;
}

Line between_extremes(const float* w) {
  float low[8], high[8];  // lanes, so that the loop vectorizes
  std::copy_n(w, 8, low);
  std::copy_n(w, 8, high);
  for (int i = 8; i < kGroup; i += 8) {
    for (int k = 0; k < 8; ++k) {
      low[k] = w[i + k] < low[k] ? w[i + k] : low[k];
      high[k] = w[i + k] > high[k] ? w[i + k] : high[k];
    }
  }
  const float least = *std::min_element(low, low + 8);
  return {(*std::max_element(high, high + 8) - least) / kLevels, least};
}

// The best of a few grids that start at the smallest weight and have 13.5 to 15.5 steps to the largest, each refitted.
// On normal weights the error is 10% below that of 15 steps between the extremes; 37 grids would win another 0.7%.
Group4 round_int4(const float* w) {
  constexpr int kGrids = 6;
  const Line extremes = between_extremes(w);
  Line best = extremes;
  if (best.step > 0.0f) {
    float above[kGroup];  // the smallest weight, so that sums of squares keep their digits
    float sum_w = 0.0f, sum_ww = 0.0f, least = INFINITY;
    for (int i = 0; i < kGroup; ++i) {
      above[i] = w[i] - extremes.base;
      sum_w += above[i];
      sum_ww += above[i] * above[i];
    }
    for (int t = 0; t < kGrids; ++t) {
      float error;
      const float steps = 13.5f + 0.4f * static_cast<float>(t);
      const Line found = fit(above, sum_w, sum_ww, {extremes.step * (kLevels / steps), 0.0f}, &error);
      if (error < least && found.step > 0.0f) {
        least = error;
        best = {found.step, extremes.base + found.base};
      }
    }
  }
  Group4 group;
  group.d = float_to_half(best.step);
  group.m = float_to_half(best.base);
  const float step = half_to_float(group.d), base = half_to_float(group.m);
  const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
  for (int i = 0; i < kGroup; ++i) group.q[i] = static_cast<uint8_t>(level(w[i], base, inverse));
  return group;
}

Group8 round_int8(const float* w, float step, float lowest) {
  Group8 group;
  group.d = float_to_half(step);
  step = half_to_float(group.d);
  for (int i = 0; i < kGroup; ++i) {
    const float v = step != 0.0f ? std::nearbyint(w[i] / step) : 0.0f;
    group.q[i] = static_cast<int8_t>(std::clamp(v, lowest, 127.0f));
  }
  return group;
}

Group8 round_int8(const float* w) {
  float largest = 0.0f;
  for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(w[i]));
  return round_int8(w, largest / 127.0f, -127.0f);
}

const uint8_t* block_of(const uint8_t* row, Stored type, int g) {
  const StoredLayout layout = layout_of(type);
  return row + static_cast<int64_t>(g / (layout.weights / kGroup)) * layout.bytes;
}

// Row r of a block from a block of a file that has the same steps.
void put_same(Int4SymmetricBlock& b, int r, const uint8_t* at) {
  put_nibbles(b.q, r, at + 2);
  b.d[r] = read_half(at);
}

void put_same(Int4Block& b, int r, const uint8_t* at, Stored type) {
  put_nibbles(b.q, r, at + (type == Stored::kQ4_1 ? 4 : 2));
  b.d[r] = read_half(at);
  // Q4_0 is d * (q - 8); -8 d is exact in half precision but where it overflows, which no sane file holds.
  b.m[r] = type == Stored::kQ4_1 ? read_half(at + 2) : float_to_half(-8.0f * half_to_float(b.d[r]));
}

Group4 int4_group(const uint8_t* row, Stored type, int g, int n) {
  Group4 group;
  if (type == Stored::kQ4_K) {
    const SubBlock sub = read_sub_block(block_of(row, type, g), g % 8, false);
    std::copy_n(sub.q, kGroup, group.q);
    group.d = float_to_half(sub.scale);
    // What rounding the scale takes from a weight in the middle is given back by the offset.
    group.m = float_to_half((sub.scale - half_to_float(group.d)) * (0.5f * kLevels) - sub.offset);
    return group;
  }
  float w[kGroup] = {};
  read_group(row, type, g, n, w);
  return round_int4(w);
}

Group8 int8_group(const uint8_t* row, Stored type, int g, int n) {
  if (type == Stored::kQ8_0) {
    Group8 group;
    const uint8_t* at = block_of(row, type, g);
    std::memcpy(group.q, at + 2, kGroup);
    group.d = read_half(at);
    return group;
  }
  if (type == Stored::kQ5_0) {
    Group8 group;
    const uint8_t* at = block_of(row, type, g);
    uint8_t q[kGroup];
    read_q5(at + 2, q);
    for (int i = 0; i < kGroup; ++i) group.q[i] = static_cast<int8_t>(q[i] - 16);
    group.d = read_half(at);
    return group;
  }
  float w[kGroup] = {};
  read_group(row, type, g, n, w);
  // A quarter of the larger step holds its 16 weights exactly (-32 steps are -128), the others to an eighth of it.
  if (type == Stored::kQ6_K) return round_int8(w, largest_step_q6(block_of(row, type, g), g % 8) / 4.0f, -128.0f);
  return round_int8(w);
}

}  // namespace

void pack_stored(const uint8_t* raw, Stored type, int rows, int in, const int32_t* source_rows, Storage storage,
                 int first_row, void* blocks) {
  const int groups = (in + kGroup - 1) / kGroup;
  const StoredLayout layout = layout_of(type);
  const int64_t row_bytes = static_cast<int64_t>(in) / layout.weights * layout.bytes;
  constexpr int kRowsAtOnce = 64;
  auto work = [&](int chunk) {
    for (int row = chunk * kRowsAtOnce; row < std::min(rows, (chunk + 1) * kRowsAtOnce); ++row) {
      const uint8_t* from = raw + row_bytes * (source_rows == nullptr ? row : source_rows[row]);
      const int to = first_row + row, r = to % kRows;
      for (int g = 0; g < groups; ++g) {
        const int64_t block = static_cast<int64_t>(to / kRows) * groups + g;
        const int n = std::min(kGroup, in - g * kGroup);
        if (storage == Storage::kInt4Symmetric) {
          put_same(static_cast<Int4SymmetricBlock*>(blocks)[block], r, block_of(from, type, g));
        } else if (storage == Storage::kInt4 && (type == Stored::kQ4_0 || type == Stored::kQ4_1)) {
          put_same(static_cast<Int4Block*>(blocks)[block], r, block_of(from, type, g), type);
        } else if (storage == Storage::kInt4) {
          put(static_cast<Int4Block*>(blocks)[block], r, int4_group(from, type, g, n));
        } else {
          put(static_cast<Int8Block*>(blocks)[block], r, int8_group(from, type, g, n));
        }
      }
    }
  };
  team().run((rows + kRowsAtOnce - 1) / kRowsAtOnce, work);
}

void pack_floats(const float* w, Storage storage, int rows, int in, int first_row, void* blocks) {
  pack_stored(reinterpret_cast<const uint8_t*>(w), Stored::kF32, rows, in, nullptr, storage, first_row, blocks);
}

}  // namespace polypath
