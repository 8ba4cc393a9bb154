// Linear layers over quantized weights. See linear.cpp for the layout of packed weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "best.h"

namespace polypath {

constexpr int kRows = 8;    // output rows interleaved in one block
constexpr int kGroup = 32;  // inputs that share a scale

// 8 rows x 32 inputs of 4-bit weights, w = d * q + m. Byte 32 c + 4 r + i holds input 8 c + i of row r in its low half,
// input 8 c + 4 + i in its high half.
struct Int4Block {
  uint8_t q[128];
  uint16_t d[kRows];  // half precision
  uint16_t m[kRows];
};

// The same where m is -8 d, as in all of GGUF's Q4_0: w = d * (q - 8), a tenth fewer bytes to read.
struct Int4SymmetricBlock {
  uint8_t q[128];
  uint16_t d[kRows];
};

// 8 rows x 32 inputs of 8-bit weights, w = d * q. Byte 32 c + 4 r + i holds input 4 c + i of row r.
struct Int8Block {
  int8_t q[256];
  uint16_t d[kRows];
};

enum class Storage : int {
  kInt4 = 4,
  kInt4Symmetric = 5,
  kInt8 = 8,
  kBfloat16 = 16,
  kFloat16 = 17,
  kFloat32 = 32
};

inline size_t block_bytes(Storage s) {
  switch (s) {
    case Storage::kInt4: return sizeof(Int4Block);
    case Storage::kInt4Symmetric: return sizeof(Int4SymmetricBlock);
    default: return sizeof(Int8Block);
  }
}

struct Matrix {
  Storage storage;
  const void* blocks;  // [ceil(out / 8), groups] blocks
  int out;
  int in;  // groups = ceil(in / 32); inputs past `in` meet zero weights
};

// y[rows, out] = x[rows, in] W^T (+ bias[out]) (+ residual[rows, out]); rows of x are `x_stride` floats apart. `best` over
// y, where it is given, is told of each piece as soon as it is written.
void linear(const float* x, int64_t x_stride, int rows, const Matrix& w, const float* bias,
            const float* residual, float* y, Best* best = nullptr);

// One row of W as floats: what an embedding looks up, and what the yardstick multiplies by.
void dequantize_row(const Matrix& w, int row, float* out);

}  // namespace polypath
