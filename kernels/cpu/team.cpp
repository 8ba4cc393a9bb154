// See team.h.
#include "team.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace polypath {
namespace {

constexpr auto kStall = std::chrono::microseconds(500);      // waited for a last chunk, and as long as three others took
constexpr auto kAlone = std::chrono::milliseconds(5);        // after a first stall
constexpr auto kLongestAlone = std::chrono::milliseconds(320);
constexpr auto kCalm = std::chrono::milliseconds(200);       // together for so long without a stall: all is forgotten
constexpr int kSpins = 2000;  // some 20-60 microseconds, longer than the gap between two operations of a step

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team& team() {
  static Team* instance = new Team;
  return *instance;
}

void Team::resize(int num_threads) {
  std::lock_guard<std::mutex> turn(caller_);
  if (num_threads - 1 == static_cast<int>(threads_.size())) return;
  {
    std::lock_guard<std::mutex> lock(sleep_);
    is_closing_.store(true);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  is_closing_.store(false);
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
}

void Team::run(int num_chunks, Work work, void* context) {
  if (num_chunks <= 0) return;
  if (threads_.empty() || num_chunks == 1) {
    for (int chunk = 0; chunk < num_chunks; ++chunk) work(context, chunk);
    return;
  }
  std::lock_guard<std::mutex> turn(caller_);
  if (was_stalled_ && is_alone()) {
    for (int chunk = 0; chunk < num_chunks; ++chunk) work(context, chunk);
    return;
  }
  operation_ = {work, context};
  num_done_.store(0, std::memory_order_relaxed);
  const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> (2 * kBits)) + 1;
  state_.store((epoch << (2 * kBits)) | (static_cast<uint64_t>(num_chunks) << kBits));
  if (num_sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  const auto began = Clock::now();
  int num_own = 0;
  while (work_once()) ++num_own;
  const auto done = Clock::now();
  wait_for_last(num_chunks, done, num_own == 0 ? Clock::duration::max() : 3 * (done - began) / num_own);
}

// Whether the caller still works alone after a stall.
bool Team::is_alone() {
  const auto now = Clock::now();
  if (now < alone_until_) return true;
  if (now - alone_until_ > kCalm) was_stalled_ = false;
  return false;
}

// Until the chunks that others have claimed are done. `since` is when the caller had none left; a wait of more than
// `usual` is a stall.
void Team::wait_for_last(int num_chunks, Clock::time_point since, Clock::duration usual) {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (num_done_.load(std::memory_order_acquire) >= num_chunks) return;
    relax();
  }
  while (num_done_.load(std::memory_order_acquire) < num_chunks) std::this_thread::yield();
  const auto now = Clock::now();
  if (now - since > std::max<Clock::duration>(kStall, usual)) note_stall(now);
}

void Team::note_stall(Clock::time_point now) {
  alone_for_ = was_stalled_ ? std::min<Clock::duration>(2 * alone_for_, kLongestAlone) : Clock::duration(kAlone);
  alone_until_ = now + alone_for_;
  was_stalled_ = true;
}

// Claims and runs one chunk; false when the running operation has none left.
bool Team::work_once() {
  uint64_t state = state_.load(std::memory_order_acquire);
  do {
    if ((state & kMask) >= ((state >> kBits) & kMask)) return false;
  } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
  // The operation cannot end before this chunk is counted, so its description stays.
  operation_.work(operation_.context, static_cast<int>(state & kMask));
  num_done_.fetch_add(1, std::memory_order_release);
  return true;
}

void Team::serve() {
  while (!is_closing_.load(std::memory_order_relaxed)) {
    while (work_once()) {
    }
    wait_for(state_.load(std::memory_order_acquire) >> (2 * kBits));
  }
}

// Returns when there may be a chunk to claim, or the team closes.
void Team::wait_for(uint64_t seen_epoch) {
  auto is_over = [&] {
    const uint64_t state = state_.load();
    return (state >> (2 * kBits)) != seen_epoch ||
           (state & kMask) < ((state >> kBits) & kMask) || is_closing_.load();
  };
  for (int spins = 0; spins < kSpins; ++spins) {
    if (is_over()) return;
    relax();
  }
  std::unique_lock<std::mutex> lock(sleep_);
  num_sleeping_.fetch_add(1);
  wake_.wait(lock, is_over);
  num_sleeping_.fetch_sub(1);
}

}  // namespace polypath
