// Weights into the blocks of linear.h.
#pragma once

#include <cstdint>

#include "linear.h"

namespace polypath {

enum class Stored : int { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8 };  // GGUF's numbers

// Interleaves `rows` rows of a GGUF tensor as rows first_row .. of `blocks`. `in` is a multiple of 32.
// `source_rows` names the row of the file for each row, or is null. Blocks must have been zeroed.
void pack_stored(const uint8_t* raw, Stored type, int rows, int in, const int32_t* source_rows, int first_row,
                 void* blocks);

// Rounds `rows` rows of floats: int4 by each group's smallest and largest weight, int8 symmetrically.
void pack_floats(const float* w, Storage storage, int rows, int in, int first_row, void* blocks);

}  // namespace polypath
