// See best.h.
#include "best.h"

#include <limits>

#include "lanes.h"

namespace polypath {
namespace {

// Where the first of the largest numbers stands, or the first that is NaN; count >= 1.
int first_of_largest(const float* x, int count) {
  constexpr int kAtOnce = 4;
  Lanes top[kAtOnce];
  Mask at[kAtOnce] = {}, odd = {};  // of each lane: where its largest number was first seen, in vectors
  for (Lanes& t : top) t = spread(-std::numeric_limits<float>::infinity());
  int i = 0;
  for (; i + kAtOnce * kLanes <= count; i += kAtOnce * kLanes) {
    const int32_t now = i;
#pragma GCC unroll 4
    for (int k = 0; k < kAtOnce; ++k) {
      const Lanes v = load(x + i + k * kLanes);
      const Mask is_larger = v > top[k];
      top[k] = is_larger ? v : top[k];
      at[k] = is_larger ? Mask{} + now : at[k];
      odd |= v != v;
    }
  }
  int best = i < count ? i : 0;
  float largest = x[best];
  bool is_odd = any_of(odd) || largest != largest;
  for (int k = i; k < count; ++k) {
    if (x[k] > largest) largest = x[best = k];
    is_odd |= x[k] != x[k];
  }
  if (is_odd) {
    for (int k = 0; k < count; ++k) {
      if (x[k] != x[k]) return k;
    }
  }
  for (int k = 0; k < kAtOnce && i > 0; ++k) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int place = at[k][lane] + k * kLanes + lane;
      if (top[k][lane] > largest || (top[k][lane] == largest && place < best)) largest = top[k][lane], best = place;
    }
  }
  return best;
}

}  // namespace

void Best::split(int pieces) {
  static thread_local std::vector<int> memory;
  pieces_ = pieces;
  memory.resize(static_cast<size_t>(rows_) * pieces);
  found_ = memory.data();
}

void Best::note(int row, int piece, int first, int last) {
  found_[static_cast<int64_t>(row) * pieces_ + piece] =
      first + first_of_largest(x_ + static_cast<int64_t>(row) * width_ + first, last - first);
}

void Best::finish(int64_t* index) const {
  for (int r = 0; r < rows_; ++r) {
    const float* row = x_ + static_cast<int64_t>(r) * width_;
    const int* own = found_ + static_cast<int64_t>(r) * pieces_;
    int at = own[0];
    for (int p = 1; p < pieces_ && row[at] == row[at]; ++p) {
      if (row[own[p]] > row[at] || row[own[p]] != row[own[p]]) at = own[p];
    }
    index[r] = at;
  }
}

}  // namespace polypath
