// A captured sequence of kernel calls, run again by one native call: what a CPU graph replays.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace polypath {

// One argument: a pointer or an integer as it is, a float as the bits of a double.
using Slot = int64_t;
constexpr int kMaxSlots = 16;

using Invoke = void (*)(const Slot* slots);

struct Kernel {
  const char* name;
  int num_arguments;
  Invoke invoke;
};

template <typename Argument>
inline Argument argument(Slot slot) {
  if constexpr (std::is_pointer_v<Argument>) {
    return reinterpret_cast<Argument>(slot);
  } else if constexpr (std::is_floating_point_v<Argument>) {
    double wide;
    std::memcpy(&wide, &slot, sizeof wide);
    return static_cast<Argument>(wide);
  } else {
    return static_cast<Argument>(slot);
  }
}

template <auto function>
struct Caller;

template <typename... Arguments, void (*function)(Arguments...)>
struct Caller<function> {
  static constexpr int kCount = sizeof...(Arguments);
  static_assert(kCount <= kMaxSlots);
  template <size_t... places>
  static void spread(const Slot* slots, std::index_sequence<places...>) {
    function(argument<Arguments>(slots[places])...);
  }
  static void invoke(const Slot* slots) { spread(slots, std::make_index_sequence<sizeof...(Arguments)>()); }
};

// Calls in order. Row counts are read when it runs, so one program serves every batch up to the captured size.
class Program {
 public:
  // `rows_slot` is the argument that the live row count replaces, -1 for none.
  void add(const Kernel& kernel, const Slot* slots, int rows_slot);
  // Runs calls first .. last - 1 over `rows` rows.
  void run(int first, int last, int rows) const;
  int64_t num_bytes() const { return static_cast<int64_t>(calls_.capacity() * sizeof(Call)); }

 private:
  struct Call {
    Invoke invoke;
    int rows_slot;
    Slot slots[kMaxSlots];
  };
  std::vector<Call> calls_;
};

}  // namespace polypath
