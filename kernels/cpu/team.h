// A team of threads that shares its machine: chunks are claimed one at a time, an operation ends when its
// chunks are done (not when every thread has arrived), idle threads spin shortly and then sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace polypath {

class Team {
 public:
  using Work = void (*)(void* context, int chunk);

  Team() = default;
  ~Team() { resize(1); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Sets how many threads work, the caller included. Not to be called while `run` runs.
  void resize(int num_threads);
  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Runs work(context, 0 .. num_chunks - 1) on the team and returns when all chunks are done.
  // Callers from several threads take turns. A thread that is put off its core with a chunk in hand holds up the
  // whole operation; when that happens, the caller works alone for a while, twice as long each time.
  void run(int num_chunks, Work work, void* context);

  template <typename Function>
  void run(int num_chunks, Function& function) {
    run(
        num_chunks, [](void* context, int chunk) { (*static_cast<Function*>(context))(chunk); },
        &function);
  }

 private:
  // One word holds an operation's number, its chunk count and the next chunk, so that a thread that wakes late can
  // only ever claim a chunk of the operation that is running now: [epoch 24 | num_chunks 20 | next 20].
  static constexpr int kBits = 20;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;

  using Clock = std::chrono::steady_clock;

  void serve();
  bool work_once();
  bool is_alone();
  void wait_for_last(int num_chunks, Clock::time_point since, Clock::duration usual);
  void note_stall(Clock::time_point now);
  void wait_for(uint64_t seen_epoch);

  struct Operation {
    Work work = nullptr;
    void* context = nullptr;
  };

  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> num_done_{0};
  alignas(64) std::atomic<int> num_sleeping_{0};
  std::atomic<bool> is_closing_{false};
  Operation operation_;
  Clock::time_point alone_until_{};  // the caller works alone until then; read and written under caller_
  Clock::duration alone_for_{};
  bool was_stalled_ = false;
  std::mutex caller_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

// The process's team. It is never destroyed: its threads may outlive static destructors.
Team& team();

}  // namespace polypath
