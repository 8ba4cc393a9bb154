// Weights into blocks of 8 interleaved rows: GGUF's own block formats as they are, floats by rounding.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear.h"
#include "numbers.h"
#include "pack.h"
#include "team.h"

namespace polypath {
namespace {

void put_int4(Int4Block& b, int r, const uint8_t* q, uint16_t d, uint16_t m) {
  for (int i = 0; i < kGroup; ++i) {
    uint8_t& byte = b.q[32 * (i / 8) + 4 * r + i % 4];
    byte = i % 8 < 4 ? static_cast<uint8_t>((byte & 0xf0) | q[i]) : static_cast<uint8_t>((byte & 0x0f) | (q[i] << 4));
  }
  b.d[r] = d;
  b.m[r] = m;
}

void put_int8(Int8Block& b, int r, const int8_t* q, uint16_t d) {
  for (int i = 0; i < kGroup; ++i) b.q[32 * (i / 4) + 4 * r + i % 4] = q[i];
  b.d[r] = d;
}

uint16_t read_half(const uint8_t* at) {
  uint16_t h;
  std::memcpy(&h, at, 2);
  return h;
}

void unpack_nibbles(const uint8_t* packed, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = packed[i] & 15;
    q[i + 16] = packed[i] >> 4;
  }
}

// Smallest and largest weight of a group become q = 0 and q = 15.
void round_int4(const float* w, uint8_t* q, uint16_t* d, uint16_t* m) {
  const auto [low, high] = std::minmax_element(w, w + kGroup);
  *m = float_to_half(*low);
  *d = float_to_half((*high - *low) / 15.0f);
  const float step = half_to_float(*d), base = half_to_float(*m);
  for (int i = 0; i < kGroup; ++i) {
    const float v = step > 0.0f ? std::nearbyint((w[i] - base) / step) : 0.0f;
    q[i] = static_cast<uint8_t>(std::clamp(v, 0.0f, 15.0f));
  }
}

void round_int8(const float* w, int8_t* q, uint16_t* d) {
  float largest = 0.0f;
  for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(w[i]));
  *d = float_to_half(largest / 127.0f);
  const float step = half_to_float(*d);
  for (int i = 0; i < kGroup; ++i) {
    const float v = step > 0.0f ? std::nearbyint(w[i] / step) : 0.0f;
    q[i] = static_cast<int8_t>(std::clamp(v, -127.0f, 127.0f));
  }
}

template <typename PutGroup>
void for_each_group(int rows, int in, const PutGroup& put) {
  const int groups = (in + kGroup - 1) / kGroup;
  constexpr int kRowsAtOnce = 64;
  auto work = [&](int chunk) {
    for (int row = chunk * kRowsAtOnce; row < std::min(rows, (chunk + 1) * kRowsAtOnce); ++row) {
      for (int g = 0; g < groups; ++g) put(row, g);
    }
  };
  team().run((rows + kRowsAtOnce - 1) / kRowsAtOnce, work);
}

}  // namespace

void pack_stored(const uint8_t* raw, Stored type, int rows, int in, const int32_t* source_rows, int first_row,
                 void* blocks) {
  const int groups = in / kGroup;
  const int bytes = type == Stored::kQ8_0 ? 34 : type == Stored::kQ4_1 ? 20 : 18;
  for_each_group(rows, in, [&](int row, int g) {
    const int64_t from = source_rows == nullptr ? row : source_rows[row];
    const uint8_t* at = raw + (from * groups + g) * bytes;
    const int to = first_row + row, r = to % kRows;
    const int64_t block = static_cast<int64_t>(to / kRows) * groups + g;
    if (type == Stored::kQ8_0) {
      put_int8(static_cast<Int8Block*>(blocks)[block], r, reinterpret_cast<const int8_t*>(at + 2), read_half(at));
      return;
    }
    uint8_t q[kGroup];
    unpack_nibbles(at + (type == Stored::kQ4_1 ? 4 : 2), q);
    const uint16_t d = read_half(at);
    // Q4_0 is d * (q - 8); -8 d is exact in half precision but where it overflows, which no sane file holds.
    const uint16_t m = type == Stored::kQ4_1 ? read_half(at + 2) : float_to_half(-8.0f * half_to_float(d));
    put_int4(static_cast<Int4Block*>(blocks)[block], r, q, d, m);
  });
}

void pack_floats(const float* w, Storage storage, int rows, int in, int first_row, void* blocks) {
  const int groups = (in + kGroup - 1) / kGroup;
  for_each_group(rows, in, [&](int row, int g) {
    float group[kGroup] = {};
    const int n = std::min(kGroup, in - g * kGroup);
    std::copy_n(w + static_cast<int64_t>(row) * in + g * kGroup, n, group);
    const int to = first_row + row, r = to % kRows;
    const int64_t block = static_cast<int64_t>(to / kRows) * groups + g;
    uint16_t d, m;
    if (storage == Storage::kInt4) {
      uint8_t q[kGroup];
      round_int4(group, q, &d, &m);
      put_int4(static_cast<Int4Block*>(blocks)[block], r, q, d, m);
    } else {
      int8_t q[kGroup];
      round_int8(group, q, &d);
      put_int8(static_cast<Int8Block*>(blocks)[block], r, q, d);
    }
  });
}

}  // namespace polypath
