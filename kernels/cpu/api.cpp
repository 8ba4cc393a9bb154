// The plain C interface that library.py binds. Every function returns when its work is done.
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "dense.h"
#include "linear.h"
#include "ops.h"
#include "pack.h"
#include "program.h"
#include "rows.h"
#include "team.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace polypath;

namespace {

Matrix matrix(const void* blocks, int storage, int out, int in) {
  return {static_cast<Storage>(storage), blocks, out, in};
}

Pool pool_of(void* data, int type, int page_size, int kv_heads, int head_dim) {
  return {data, static_cast<KvType>(type), page_size, kv_heads, head_dim};
}

}  // namespace

API void pp_set_threads(int num_threads) { team().resize(num_threads); }
API int pp_threads() { return team().size(); }

API int64_t pp_packed_bytes(int storage, int out, int in) {
  if (is_dense(static_cast<Storage>(storage))) return dense_bytes(static_cast<Storage>(storage), out, in);
  const int64_t rows = (out + kRows - 1) / kRows, groups = (in + kGroup - 1) / kGroup;
  return rows * groups * static_cast<int64_t>(block_bytes(static_cast<Storage>(storage)));
}

API void pp_pack_blocks(const uint8_t* raw, int type, int rows, int in, const int32_t* source_rows, int storage,
                        int first_row, void* blocks) {
  pack_stored(raw, static_cast<Stored>(type), rows, in, source_rows, static_cast<Storage>(storage), first_row, blocks);
}

API void pp_pack_floats(const float* w, int storage, int rows, int in, int first_row, void* blocks) {
  const auto kind = static_cast<Storage>(storage);
  is_dense(kind) ? pack_dense(w, kind, rows, in, first_row, blocks) : pack_floats(w, kind, rows, in, first_row, blocks);
}

API void pp_linear(const float* x, int64_t x_stride, int rows, const void* blocks, int storage, int out, int in,
                   const float* bias, const float* residual, float* y) {
  const Matrix w = matrix(blocks, storage, out, in);
  const auto run = is_dense(w.storage) ? dense_linear : linear;
  run(x, x_stride, rows, w, bias, residual, y, nullptr);
}

API void pp_linear_best(const float* x, int64_t x_stride, int rows, const void* blocks, int storage, int out, int in,
                        const float* bias, float* y, int64_t* index) {
  const Matrix w = matrix(blocks, storage, out, in);
  Best best(y, rows, out);
  const auto run = is_dense(w.storage) ? dense_linear : linear;
  run(x, x_stride, rows, w, bias, nullptr, y, &best);
  best.finish(index);
}

API void pp_dequantize(const void* blocks, int storage, int out, int in, const int64_t* rows, int num_rows, float* y) {
  const Matrix w = matrix(blocks, storage, out, in);
  const auto read = is_dense(w.storage) ? dense_row : dequantize_row;
  auto work = [&](int i) { read(w, static_cast<int>(rows[i]), y + static_cast<int64_t>(i) * in); };
  team().run(num_rows, work);
}

API void pp_rms_norm(const float* x, const float* weight, float eps, int rows, int width, float* y) {
  rms_norm(x, weight, eps, rows, width, y);
}

API void pp_add_rms_norm(const float* x, const float* residual, const float* weight, float eps, int rows, int width,
                         float* y, float* total) {
  add_rms_norm(x, residual, weight, eps, rows, width, y, total);
}

API void pp_silu_mul(const float* gate_up, int rows, int width, float* y) { silu_mul(gate_up, rows, width, y); }

API void pp_rope_store(const float* qkv, const float* cos, const float* sin, const float* q_norm, const float* k_norm,
                       float eps, void* pool, int kv_type, int page_size, int kv_heads, int head_dim,
                       const int64_t* slots, int rows, int heads, float* q) {
  rope_store(qkv, cos, sin, q_norm, k_norm, eps, pool_of(pool, kv_type, page_size, kv_heads, head_dim), slots, rows,
             heads, q);
}

API void pp_attention(const float* q, void* pool, int kv_type, int page_size, int kv_heads, int head_dim,
                      const int32_t* page_table, const int32_t* query_starts, const int32_t* kv_lens, int num_rows,
                      int max_pages, int heads, int window, float scale, float* out) {
  const Rows rows{page_table, query_starts, kv_lens, num_rows, max_pages};
  attention(q, pool_of(pool, kv_type, page_size, kv_heads, head_dim), rows, heads, window, scale, out);
}

API void pp_argmax(const float* x, int rows, int width, int64_t* index) { argmax(x, rows, width, index); }

API void pp_cos_sin(const int64_t* positions, const float* inverse, int rows, int half, float* cos, float* sin) {
  cos_sin(positions, inverse, rows, half, cos, sin);
}

API void pp_gather_rows(const float* x, const int64_t* index, int rows, int width, float* y) {
  gather_rows(x, index, rows, width, y);
}

API void pp_put_columns(const float* x, int rows, int width, float* y, int64_t y_stride) {
  put_columns(x, rows, width, y, y_stride);
}

// Programs: the kernels that may be captured, by name.
namespace {

#define KERNEL(function) \
  Kernel { #function, Caller<function>::kCount, Caller<function>::invoke }

const Kernel kKernels[] = {
    KERNEL(pp_linear), KERNEL(pp_linear_best), KERNEL(pp_dequantize), KERNEL(pp_rms_norm), KERNEL(pp_add_rms_norm), KERNEL(pp_silu_mul),
    KERNEL(pp_rope_store), KERNEL(pp_attention),  KERNEL(pp_argmax),   KERNEL(pp_cos_sin),      KERNEL(pp_gather_rows),
    KERNEL(pp_put_columns)};

}  // namespace

API Program* pp_program_new() { return new Program; }
API void pp_program_free(Program* program) { delete program; }

// Returns 1, or 0 when no such kernel takes that many arguments.
API int pp_program_add(Program* program, const char* name, const int64_t* slots, int num_slots, int rows_slot) {
  for (const Kernel& kernel : kKernels) {
    if (std::strcmp(kernel.name, name) != 0 || kernel.num_arguments != num_slots) continue;
    program->add(kernel, slots, rows_slot);
    return 1;
  }
  return 0;
}

API void pp_program_run(const Program* program, int first, int last, int rows) { program->run(first, last, rows); }
API int64_t pp_program_bytes(const Program* program) { return program->num_bytes(); }
