// Weights into the blocks of linear.h.
#pragma once

#include <cstdint>

#include "linear.h"
#include "stored.h"

namespace polypath {

// Interleaves `rows` rows of a GGUF tensor as rows first_row .. of blocks. `in` is a multiple of the type's block.
// `source_rows` names the row of the file for each row, or is null. Blocks must have been zeroed.
// As they are: Q4_0 in int4 and in symmetric int4, which takes nothing else, Q4_1 and Q4_K (scales rounded to half
// precision) in int4, Q8_0 and Q5_0 in int8. All else is rounded: to int8 symmetrically (Q6_K at a quarter of its larger
// step), to int4 by a search for step and offset.
void pack_stored(const uint8_t* raw, Stored type, int rows, int in, const int32_t* source_rows, Storage storage,
                 int first_row, void* blocks);

// The same for `rows` rows of floats of any width, in int4 or int8.
void pack_floats(const float* w, Storage storage, int rows, int in, int first_row, void* blocks);

}  // namespace polypath
