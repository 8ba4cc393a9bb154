// GGUF's tensor types: where a group of 32 weights lies in a row, and what floats it stands for. Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "numbers.h"

namespace polypath {

enum class Stored : int {  // GGUF's numbers
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

struct StoredLayout {
  int weights;  // of one block
  int bytes;
};

inline StoredLayout layout_of(Stored type) {
  switch (type) {
    case Stored::kF32: return {1, 4};
    case Stored::kF16: case Stored::kBF16: return {1, 2};
    case Stored::kQ4_0: return {32, 18};
    case Stored::kQ4_1: return {32, 20};
    case Stored::kQ5_0: return {32, 22};
    case Stored::kQ5_1: return {32, 24};
    case Stored::kQ8_0: return {32, 34};
    case Stored::kQ4_K: return {256, 144};
    case Stored::kQ5_K: return {256, 176};
    case Stored::kQ6_K: return {256, 210};
  }
  return {1, 4};
}

inline uint16_t read_half(const uint8_t* at) {
  uint16_t h;
  std::memcpy(&h, at, 2);
  return h;
}

inline void unpack_nibbles(const uint8_t* packed, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = packed[i] & 15;
    q[i + 16] = packed[i] >> 4;
  }
}

// Group `j` (0 .. 7) of a Q4_K or Q5_K block: w = scale * q - offset.
struct SubBlock {
  float scale;
  float offset;
  uint8_t q[32];
};

inline SubBlock read_sub_block(const uint8_t* block, int j, bool has_fifth_bits) {
  const uint8_t* packed = block + 4;  // 12 bytes with 8 scales and 8 offsets of 6 bits
  int scale, offset;
  if (j < 4) {
    scale = packed[j] & 63;
    offset = packed[j + 4] & 63;
  } else {
    scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4);
    offset = (packed[j + 4] >> 4) | (packed[j] >> 6 << 4);
  }
  SubBlock sub;
  sub.scale = half_to_float(read_half(block)) * static_cast<float>(scale);
  sub.offset = half_to_float(read_half(block + 2)) * static_cast<float>(offset);
  const uint8_t* nibbles = block + (has_fifth_bits ? 48 : 16) + 32 * (j / 2);
  for (int i = 0; i < 32; ++i) sub.q[i] = (nibbles[i] >> (4 * (j & 1))) & 15;
  if (has_fifth_bits) {
    for (int i = 0; i < 32; ++i) sub.q[i] |= (block[16 + i] >> j & 1) << 4;
  }
  return sub;
}

// The larger of the two steps of group `j` of a Q6_K block, whose halves of 16 have a scale of either sign each.
inline float largest_step_q6(const uint8_t* block, int j) {
  const auto* scales = reinterpret_cast<const int8_t*>(block + 192) + 2 * j;
  const int larger = std::abs(int{scales[0]}) < std::abs(int{scales[1]}) ? scales[1] : scales[0];
  return half_to_float(read_half(block + 208)) * static_cast<float>(larger);
}

inline void read_q6(const uint8_t* block, int j, float* w) {
  const int half = j / 4, part = j % 4;  // 128 weights of 4 parts that share the bytes of high bits
  const uint8_t* low = block + 64 * half + 32 * (part & 1);
  const uint8_t* high = block + 128 + 32 * half;
  const auto* scales = reinterpret_cast<const int8_t*>(block + 192) + 2 * j;
  const float d = half_to_float(read_half(block + 208));
  for (int i = 0; i < 32; ++i) {
    const int q = ((low[i] >> (4 * (part >> 1))) & 15) | ((high[i] >> (2 * part) & 3) << 4);
    w[i] = d * static_cast<float>(scales[i / 16]) * static_cast<float>(q - 32);
  }
}

// The fifth bits of Q5_0 and Q5_1 stand in one word before the nibbles.
inline void read_q5(const uint8_t* bits, uint8_t* q) {
  uint32_t fifth;
  std::memcpy(&fifth, bits, 4);
  unpack_nibbles(bits + 4, q);
  for (int i = 0; i < 32; ++i) q[i] |= (fifth >> i & 1) << 4;
}

// `n` (at most 32) weights of group `g` of a row as floats.
inline void read_group(const uint8_t* row, Stored type, int g, int n, float* w) {
  const StoredLayout layout = layout_of(type);
  const uint8_t* at = layout.weights == 1 ? row + static_cast<int64_t>(g) * 32 * layout.bytes
                                          : row + static_cast<int64_t>(g / (layout.weights / 32)) * layout.bytes;
  uint8_t q[32];
  switch (type) {
    case Stored::kF32: std::memcpy(w, at, 4 * static_cast<size_t>(n)); return;
    case Stored::kF16:
      for (int i = 0; i < n; ++i) w[i] = half_to_float(read_half(at + 2 * i));
      return;
    case Stored::kBF16:
      for (int i = 0; i < n; ++i) w[i] = bfloat_to_float(read_half(at + 2 * i));
      return;
    case Stored::kQ6_K: return read_q6(at, g % 8, w);
    case Stored::kQ4_K: case Stored::kQ5_K: {
      const SubBlock sub = read_sub_block(at, g % 8, type == Stored::kQ5_K);
      for (int i = 0; i < 32; ++i) w[i] = sub.scale * static_cast<float>(sub.q[i]) - sub.offset;
      return;
    }
    case Stored::kQ8_0:
      for (int i = 0; i < 32; ++i) w[i] = half_to_float(read_half(at)) * static_cast<float>(static_cast<int8_t>(at[2 + i]));
      return;
    case Stored::kQ4_0: unpack_nibbles(at + 2, q); break;
    case Stored::kQ4_1: unpack_nibbles(at + 4, q); break;
    case Stored::kQ5_0: read_q5(at + 2, q); break;
    case Stored::kQ5_1: read_q5(at + 4, q); break;
  }
  const bool has_offset = type == Stored::kQ4_1 || type == Stored::kQ5_1;
  const float d = half_to_float(read_half(at)), m = has_offset ? half_to_float(read_half(at + 2)) : 0.0f;
  const int zero = has_offset ? 0 : type == Stored::kQ5_0 ? 16 : 8;
  for (int i = 0; i < 32; ++i) w[i] = d * static_cast<float>(q[i] - zero) + m;
}

}  // namespace polypath
