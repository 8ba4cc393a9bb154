// Small operations over rows that surround a decoder's layers.
#pragma once

#include <cstdint>

namespace polypath {

// Rotary angles: cos and sin [rows, half] of positions[row] * inverse[i].
void cos_sin(const int64_t* positions, const float* inverse, int rows, int half, float* cos, float* sin);

// y[i] = x[index[i]], rows of `width` floats.
void gather_rows(const float* x, const int64_t* index, int rows, int width, float* y);

// x [rows, width] as columns of y, whose rows are `y_stride` floats apart.
void put_columns(const float* x, int rows, int width, float* y, int64_t y_stride);

}  // namespace polypath
