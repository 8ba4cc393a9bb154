// The operations between linear layers and attention, over float activations.
#pragma once

#include <cstdint>

namespace polypath {

enum class KvType : int { kFloat = 0, kBfloat = 1 };

// Where keys and values lie: a layer's pool is [pages, 2, page_size, kv_heads, head_dim], keys first.
struct Pool {
  void* data;
  KvType type;
  int page_size;
  int kv_heads;
  int head_dim;
};

void rms_norm(const float* x, const float* weight, float eps, int rows, int width, float* y);

// total = x + residual; y = rms_norm(total).
void add_rms_norm(const float* x, const float* residual, const float* weight, float eps, int rows, int width, float* y,
                  float* total);

// gate_up [rows, 2 width] -> silu(gate) * up [rows, width].
void silu_mul(const float* gate_up, int rows, int width, float* y);

// qkv [rows, (heads + 2 kv_heads) head_dim]: normalise q and k (weights may be null), rotate by cos and sin
// [rows, head_dim / 2], write q [rows, heads, head_dim], store k and v at slots.
void rope_store(const float* qkv, const float* cos, const float* sin, const float* q_norm, const float* k_norm, float eps,
                const Pool& pool, const int64_t* slots, int rows, int heads, float* q);

// Index of each row's largest value, the first of equals; a NaN counts as the largest, as in torch.
void argmax(const float* x, int rows, int width, int64_t* index);

}  // namespace polypath
