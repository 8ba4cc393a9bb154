// A thread that sits on a chunk stalls an operation once; the next ones run without it for a while, then with it again.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "team.h"

using polypath::team;

namespace {

// Two chunks, one on each thread; the other thread sleeps on its own. Returns how many chunks ran on the caller.
int run_pair(std::chrono::milliseconds sleep, bool wait_for_other) {
  const auto caller = std::this_thread::get_id();
  std::atomic<int> on_caller{0};
  std::atomic<bool> taken{false};
  auto work = [&](int) {
    if (std::this_thread::get_id() != caller) {
      taken.store(true);
      std::this_thread::sleep_for(sleep);
      return;
    }
    ++on_caller;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    while (wait_for_other && !taken.load() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  };
  team().run(2, work);
  return on_caller.load();
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

}  // namespace

// The other thread may be quick enough to take both chunks, or a busy machine may have stalled it already: try again.
int run_shared_pair(std::chrono::milliseconds sleep) {
  int on_caller = 0;
  for (int tries = 0; tries < 50 && on_caller != 1; ++tries) on_caller = run_pair(sleep, true);
  return on_caller;
}

int main() {
  using std::chrono::milliseconds;
  team().resize(2);
  require(run_shared_pair(milliseconds(30)) == 1, "both threads work before a stall");
  require(run_pair(milliseconds(0), false) == 2, "after a stall the caller works alone");
  std::this_thread::sleep_for(milliseconds(400));
  require(run_shared_pair(milliseconds(0)) == 1, "later both work again");
  team().resize(1);
  std::puts("ok");
}
