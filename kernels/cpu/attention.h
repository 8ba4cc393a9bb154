// Attention over paged keys and values.
#pragma once

#include <cstdint>

#include "ops.h"

namespace polypath {

// The rows (requests) of one step; every tensor is read when it runs, so that a captured call can be replayed.
struct Rows {
  const int32_t* page_table;    // [rows, max_pages]
  const int32_t* query_starts;  // [rows + 1], into the step's tokens
  const int32_t* kv_lens;       // [rows], this step's tokens included
  int num_rows;
  int max_pages;
};

// q and out are [tokens, heads, head_dim]. A token sees itself and what came before, at most `window` tokens with
// itself when window > 0. The result of a token depends neither on other rows nor on which tokens of its own row come in
// the same call.
void attention(const float* q, const Pool& pool, const Rows& rows, int heads, int window, float scale, float* out);

}  // namespace polypath
