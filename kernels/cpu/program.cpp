// See program.h.
#include "program.h"

#include <algorithm>

namespace polypath {

void Program::add(const Kernel& kernel, const Slot* slots, int rows_slot) {
  Call call{kernel.invoke, rows_slot, {}};
  std::copy_n(slots, kernel.num_arguments, call.slots);
  calls_.push_back(call);
}

void Program::run(int first, int last, int rows) const {
  for (int i = first; i < last; ++i) {
    const Call& call = calls_[static_cast<size_t>(i)];
    if (call.rows_slot < 0) {
      call.invoke(call.slots);
      continue;
    }
    Slot slots[kMaxSlots];
    std::copy_n(call.slots, kMaxSlots, slots);
    slots[call.rows_slot] = rows;
    call.invoke(slots);
  }
}

}  // namespace polypath
