// Linear layers over float weights, stored in panels of 16 outputs: panel p holds input 0 of outputs 16 p .. 16 p + 15,
// then input 1 of them, and so on. Missing outputs of the last panel are zero.
#pragma once

#include <cstdint>

#include "linear.h"

namespace polypath {

constexpr int kPanel = 16;

inline bool is_dense(Storage s) {
  return s == Storage::kBfloat16 || s == Storage::kFloat16 || s == Storage::kFloat32;
}

int64_t dense_bytes(Storage storage, int out, int in);

// Stores `rows` rows of floats as outputs first_row ..; exact where the storage can hold them.
void pack_dense(const float* w, Storage storage, int rows, int in, int first_row, void* panels);

// As `linear` in linear.h, with activations as they are.
void dense_linear(const float* x, int64_t x_stride, int rows, const Matrix& w, const float* bias, const float* residual,
                  float* y, Best* best = nullptr);

void dense_row(const Matrix& w, int row, float* out);

}  // namespace polypath
