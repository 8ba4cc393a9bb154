// See rows.h.
#include "rows.h"

#include <algorithm>
#include <cmath>

#include "team.h"

namespace polypath {
namespace {

constexpr int kRowsAtOnce = 16;

// Runs `row` for every row; few rows stay on the calling thread.
template <typename Row>
void for_each_row(int rows, const Row& row) {
  auto work = [&](int chunk) {
    for (int r = chunk * kRowsAtOnce; r < std::min(rows, (chunk + 1) * kRowsAtOnce); ++r) row(r);
  };
  team().run((rows + kRowsAtOnce - 1) / kRowsAtOnce, work);
}

}  // namespace

void cos_sin(const int64_t* positions, const float* inverse, int rows, int half, float* cos, float* sin) {
  for_each_row(rows, [&](int r) {
    const float position = static_cast<float>(positions[r]);
    const int64_t at = static_cast<int64_t>(r) * half;
    for (int i = 0; i < half; ++i) {
      const float angle = position * inverse[i];
      cos[at + i] = std::cos(angle);
      sin[at + i] = std::sin(angle);
    }
  });
}

void gather_rows(const float* x, const int64_t* index, int rows, int width, float* y) {
  for_each_row(rows, [&](int r) { std::copy_n(x + index[r] * width, width, y + static_cast<int64_t>(r) * width); });
}

void put_columns(const float* x, int rows, int width, float* y, int64_t y_stride) {
  for_each_row(rows, [&](int r) { std::copy_n(x + static_cast<int64_t>(r) * width, width, y + r * y_stride); });
}

}  // namespace polypath
