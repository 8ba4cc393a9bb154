// The largest number of each row, found piece by piece while the pieces are in caches.
#pragma once

#include <cstdint>
#include <vector>

namespace polypath {

// Of x [rows, width]: the first of equals counts, and a NaN as the largest, as in torch.
class Best {
 public:
  Best(const float* x, int rows, int width) : x_(x), rows_(rows), width_(width) {}
  // Rows will come in `pieces` pieces each. To be called by the thread that calls `finish`.
  void split(int pieces);
  // x[row][first .. last) is written; last > first. Different pieces may be noted by different threads.
  void note(int row, int piece, int first, int last);
  // When all pieces are noted: the index of each row's largest.
  void finish(int64_t* index) const;

 private:
  const float* x_;
  int rows_;
  int width_;
  int pieces_ = 0;
  int* found_ = nullptr;  // [rows, pieces]
};

}  // namespace polypath
