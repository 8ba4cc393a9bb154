// Runs every native kernel on odd sizes with several threads, and the thread team under two callers at once; built with
// the address or the thread sanitizer by test_sanitizers.py. Prints "ok" at its end.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "attention.h"
#include "dense.h"
#include "linear.h"
#include "ops.h"
#include "pack.h"
#include "team.h"

using namespace polypath;

namespace {

std::vector<float> numbers(size_t n) {
  std::vector<float> v(n);
  for (auto& x : v) x = static_cast<float>(std::rand()) / RAND_MAX - 0.5f;
  return v;
}

void require(bool holds, const char* what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    std::exit(1);
  }
}

void run_linear(Storage storage, int rows, int out, int in) {
  const int64_t groups = (in + kGroup - 1) / kGroup;
  const size_t bytes = is_dense(storage) ? dense_bytes(storage, out, in)
                                         : (out + kRows - 1) / kRows * groups * block_bytes(storage);
  std::vector<char> blocks(bytes);
  const auto w = numbers(static_cast<size_t>(out) * in), x = numbers(static_cast<size_t>(rows) * in), bias = numbers(out);
  std::vector<float> y(static_cast<size_t>(rows) * out), row(in);
  const Matrix matrix{storage, blocks.data(), out, in};
  if (is_dense(storage)) {
    pack_dense(w.data(), storage, out, in, 0, blocks.data());
    dense_linear(x.data(), in, rows, matrix, bias.data(), nullptr, y.data(), nullptr);
    dense_row(matrix, out - 1, row.data());
  } else {
    pack_floats(w.data(), storage, out, in, 0, blocks.data());
    linear(x.data(), in, rows, matrix, bias.data(), nullptr, y.data());
    dequantize_row(matrix, out - 1, row.data());
  }
  for (const float v : y) require(std::isfinite(v), "linear is finite");
  Best best(y.data(), rows, out);
  std::vector<int64_t> index(rows);
  const auto run = is_dense(storage) ? dense_linear : linear;
  run(x.data(), in, rows, matrix, bias.data(), nullptr, y.data(), &best);
  best.finish(index.data());
  for (int r = 0; r < rows; ++r) {
    const auto first = y.begin() + static_cast<int64_t>(r) * out;
    require(std::max_element(first, first + out) - first == index[r], "the largest output is found");
  }
  for (int i = 0; i < in; ++i) require(std::fabs(row[i] - w[static_cast<size_t>(out - 1) * in + i]) < 0.1f, "rows come back");
}

void run_stored(Stored type, int rows, int in) {
  const StoredLayout layout = layout_of(type);
  std::vector<uint8_t> raw(static_cast<size_t>(rows) * in / layout.weights * layout.bytes);
  for (auto& byte : raw) byte = static_cast<uint8_t>(std::rand() & 0x3b);  // no scale is infinite
  std::vector<int32_t> order(rows);
  for (int i = 0; i < rows; ++i) order[i] = rows - 1 - i;
  for (const Storage storage : {Storage::kInt4, Storage::kInt4Symmetric, Storage::kInt8}) {
    if (storage == Storage::kInt4Symmetric && type != Stored::kQ4_0) continue;
    std::vector<char> blocks(static_cast<size_t>((rows + kRows - 1) / kRows) * (in / kGroup) * block_bytes(storage));
    pack_stored(raw.data(), type, rows, in, order.data(), storage, 0, blocks.data());
    const Matrix matrix{storage, blocks.data(), rows, in};
    std::vector<float> row(in);
    dequantize_row(matrix, rows - 1, row.data());
    for (const float v : row) require(std::isfinite(v), "stored weights are finite");
    for (const int tokens : {1, 6, 40}) {
      const auto x = numbers(static_cast<size_t>(tokens) * in);
      std::vector<float> y(static_cast<size_t>(tokens) * rows);
      linear(x.data(), in, tokens, matrix, nullptr, nullptr, y.data());
      for (const float v : y) require(std::isfinite(v), "products of stored weights are finite");
    }
  }
}

void run_attention(KvType type, int heads, int kv_heads, int dim, int page_size, int window) {
  const std::vector<int32_t> lens = {1, 300, 70, 33}, starts = {0, 1, 2, 22, 55};
  const int max_pages = 300 / page_size + 1;
  std::vector<int32_t> table(lens.size() * max_pages);
  int next = 1;
  for (size_t row = 0; row < lens.size(); ++row) {
    for (int i = 0; i * page_size < lens[row]; ++i) table[row * max_pages + i] = next++;
  }
  const size_t cells = static_cast<size_t>(next) * 2 * page_size * kv_heads * dim;
  std::vector<float> wide(type == KvType::kFloat ? cells : 0);
  std::vector<uint16_t> narrow(type == KvType::kBfloat ? cells : 0);
  const Pool pool{type == KvType::kFloat ? static_cast<void*>(wide.data()) : narrow.data(), type, page_size, kv_heads, dim};
  const int tokens = starts.back();
  std::vector<int64_t> slots(tokens);
  for (int i = 0; i < tokens; ++i) slots[i] = page_size + i;
  const auto qkv = numbers(static_cast<size_t>(tokens) * (heads + 2 * kv_heads) * dim);
  const auto cos = numbers(static_cast<size_t>(tokens) * dim / 2), sin = numbers(static_cast<size_t>(tokens) * dim / 2);
  const auto norm = numbers(dim);
  std::vector<float> q(static_cast<size_t>(tokens) * heads * dim), out(q.size());
  rope_store(qkv.data(), cos.data(), sin.data(), norm.data(), norm.data(), 1e-6f, pool, slots.data(), tokens, heads, q.data());
  const Rows rows{table.data(), starts.data(), lens.data(), static_cast<int>(lens.size()), max_pages};
  attention(q.data(), pool, rows, heads, window, 0.125f, out.data());
  for (const float v : out) require(std::isfinite(v), "attention is finite");
}

void run_small(int rows, int width) {
  const auto x = numbers(static_cast<size_t>(rows) * width * 2), weight = numbers(width);
  std::vector<float> y(x.size()), total(x.size());
  std::vector<int64_t> index(rows);
  rms_norm(x.data(), weight.data(), 1e-5f, rows, width, y.data());
  add_rms_norm(x.data(), x.data(), weight.data(), 1e-5f, rows, width, y.data(), total.data());
  silu_mul(x.data(), rows, width, y.data());
  argmax(x.data(), rows, width, index.data());
  for (const int64_t i : index) require(i >= 0 && i < width, "argmax is in range");
}

void run_team() {
  auto call = [] {
    for (int round = 0; round < 500; ++round) {
      std::vector<int> seen(1 + round % 97);
      auto work = [&](int chunk) { ++seen[chunk]; };
      team().run(static_cast<int>(seen.size()), work);
      for (const int times : seen) require(times == 1, "every chunk runs once");
    }
  };
  std::thread other(call);
  call();
  other.join();
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 3, 8}) {
    team().resize(threads);
    run_team();
    for (const Storage s : {Storage::kInt4, Storage::kInt8, Storage::kBfloat16, Storage::kFloat16, Storage::kFloat32}) {
      for (const int rows : {1, 3, 6, 40}) run_linear(s, rows, 37, 75);
      run_linear(s, 131, 37, 900);  // more tokens than a chunk takes, more groups than a slab
    }
    for (const Stored type : {Stored::kF16, Stored::kBF16, Stored::kQ4_0, Stored::kQ4_1, Stored::kQ5_0, Stored::kQ5_1,
                              Stored::kQ8_0, Stored::kQ4_K, Stored::kQ5_K, Stored::kQ6_K}) {
      run_stored(type, 75, 768);
    }
    for (const int window : {0, 20}) {
      run_attention(KvType::kFloat, 6, 2, 40, 16, window);
      run_attention(KvType::kBfloat, 4, 4, 64, 4, window);
    }
    for (const int rows : {1, 2, 100}) run_small(rows, 33);
  }
  std::puts("ok");
}
