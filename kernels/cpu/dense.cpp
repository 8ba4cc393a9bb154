// See dense.h. Each output is summed over the inputs in their order, whatever the batch, so rows do not depend on
// their neighbours.
#include "dense.h"

#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "numbers.h"
#include "team.h"

namespace polypath {
namespace {

constexpr int kTokenTile = 96;  // rows of x that one chunk takes

template <typename Weight>
Weight narrow(float f);
template <>
float narrow<float>(float f) {
  return f;
}
template <>
Bfloat narrow<Bfloat>(float f) {
  return {float_to_bfloat(f)};
}
template <>
Half narrow<Half>(float f) {
  return {float_to_half(f)};
}

struct Task {
  const float* x;
  int64_t x_stride;
  Matrix w;
  const float* bias;
  const float* residual;
  float* y;
};

void store(const Task& task, int token, int first, const float* values) {
  const int n = std::min(kPanel, task.w.out - first);
  const int64_t at = static_cast<int64_t>(token) * task.w.out + first;
  for (int i = 0; i < n; ++i) {
    float v = values[i];
    if (task.bias != nullptr) v += task.bias[first + i];
    if (task.residual != nullptr) v += task.residual[at + i];
    task.y[at + i] = v;
  }
}

// `tile` tokens against `panels` neighbouring panels.
template <typename Weight, int tile, int panels>
inline __attribute__((always_inline)) void multiply(const Task& task, const Weight* w, int panel, int token) {
  const int in = task.w.in;
  const float* x[tile];
  for (int t = 0; t < tile; ++t) x[t] = task.x + (token + t) * task.x_stride;
  Lanes sums[tile][2 * panels] = {};
  for (int i = 0; i < in; ++i) {
    for (int p = 0; p < panels; ++p) {
      const Weight* at = w + (static_cast<int64_t>(p) * in + i) * kPanel;
      const Lanes b0 = load(at), b1 = load(at + kLanes);
      for (int t = 0; t < tile; ++t) {
        sums[t][2 * p] += b0 * x[t][i];
        sums[t][2 * p + 1] += b1 * x[t][i];
      }
    }
  }
  for (int t = 0; t < tile; ++t) {
    for (int p = 0; p < panels; ++p) {
      float values[kPanel];
      save(values, sums[t][2 * p]);
      save(values + kLanes, sums[t][2 * p + 1]);
      store(task, token + t, (panel + p) * kPanel, values);
    }
  }
}

template <typename Weight>
void multiply_chunk(const Task& task, int begin, int end, int first, int last) {
  const auto* whole = static_cast<const Weight*>(task.w.blocks);
  const int64_t panel_size = static_cast<int64_t>(task.w.in) * kPanel;
  if (last - first == 1) {  // two panels at once hide the latency of a single row
    int panel = begin;
    for (; panel + 2 <= end; panel += 2) multiply<Weight, 1, 2>(task, whole + panel * panel_size, panel, first);
    if (panel < end) multiply<Weight, 1, 1>(task, whole + panel * panel_size, panel, first);
    return;
  }
  for (int panel = begin; panel < end; ++panel) {
    const Weight* w = whole + panel * panel_size;
    int token = first;
    for (; token + 6 <= last; token += 6) multiply<Weight, 6, 1>(task, w, panel, token);
    for (; token + 4 <= last; token += 4) multiply<Weight, 4, 1>(task, w, panel, token);
    for (; token + 2 <= last; token += 2) multiply<Weight, 2, 1>(task, w, panel, token);
    if (token < last) multiply<Weight, 1, 1>(task, w, panel, token);
  }
}

template <typename Weight>
void pack(const float* w, int rows, int in, int first_row, void* panels) {
  auto* to = static_cast<Weight*>(panels);
  constexpr int kRowsAtOnce = kPanel;
  auto work = [&](int chunk) {
    for (int row = chunk * kRowsAtOnce; row < std::min(rows, (chunk + 1) * kRowsAtOnce); ++row) {
      const int out = first_row + row;
      Weight* panel = to + static_cast<int64_t>(out / kPanel) * in * kPanel + out % kPanel;
      for (int i = 0; i < in; ++i) panel[static_cast<int64_t>(i) * kPanel] = narrow<Weight>(w[static_cast<int64_t>(row) * in + i]);
    }
  };
  team().run((rows + kRowsAtOnce - 1) / kRowsAtOnce, work);
}

template <typename Weight>
void read_row(const Matrix& w, int row, float* out) {
  const Weight* panel = static_cast<const Weight*>(w.blocks) + static_cast<int64_t>(row / kPanel) * w.in * kPanel;
  for (int i = 0; i < w.in; ++i) out[i] = widen(panel[static_cast<int64_t>(i) * kPanel + row % kPanel]);
}

// Calls `function` with a null pointer of the stored type.
template <typename Function>
void with_type(Storage storage, const Function& function) {
  switch (storage) {
    case Storage::kBfloat16: return function(static_cast<Bfloat*>(nullptr));
    case Storage::kFloat16: return function(static_cast<Half*>(nullptr));
    default: return function(static_cast<float*>(nullptr));
  }
}

}  // namespace

int64_t dense_bytes(Storage storage, int out, int in) {
  const int64_t cells = static_cast<int64_t>((out + kPanel - 1) / kPanel) * kPanel * in;
  return cells * (storage == Storage::kFloat32 ? 4 : 2);
}

void pack_dense(const float* w, Storage storage, int rows, int in, int first_row, void* panels) {
  with_type(storage, [&](auto* type) { pack<std::remove_pointer_t<decltype(type)>>(w, rows, in, first_row, panels); });
}

void dense_linear(const float* x, int64_t x_stride, int rows, const Matrix& w, const float* bias, const float* residual,
                  float* y, Best* best) {
  const Task task{x, x_stride, w, bias, residual, y};
  const int panels = (w.out + kPanel - 1) / kPanel;
  const int token_tiles = (rows + kTokenTile - 1) / kTokenTile;
  const int pairs = std::max(1, std::min(16, panels / (16 * team().size())));
  const int per_chunk = 2 * pairs;
  const int panel_chunks = (panels + per_chunk - 1) / per_chunk;
  if (best != nullptr) best->split(panel_chunks);
  auto work = [&](int chunk) {
    const int first = chunk / panel_chunks * kTokenTile, begin = chunk % panel_chunks * per_chunk;
    const int last = std::min(rows, first + kTokenTile), end = std::min(panels, begin + per_chunk);
    with_type(w.storage, [&](auto* type) {
      multiply_chunk<std::remove_pointer_t<decltype(type)>>(task, begin, end, first, last);
    });
    for (int row = first; best != nullptr && row < last; ++row) {
      best->note(row, chunk % panel_chunks, begin * kPanel, std::min(end * kPanel, w.out));
    }
  };
  team().run(token_tiles * panel_chunks, work);
}

void dense_row(const Matrix& w, int row, float* out) {
  with_type(w.storage, [&](auto* type) { read_row<std::remove_pointer_t<decltype(type)>>(w, row, out); });
}

}  // namespace polypath
