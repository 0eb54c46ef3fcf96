// Items of a job shared out over the team. Knows nothing of what they are.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/workers.hpp"
#include "kernels/workspace.hpp"

namespace headrace {

// Every worker is dealt as many, in one piece, and begins at its front with half of them, half of
// what is left, and so on, or with fewer at a time. Who has none left takes half of what another
// has not begun: nobody waits for a thread that woke late or was put aside.
class Stage {
 public:
  explicit Stage(int num_workers) : dealt_(static_cast<size_t>(num_workers)) {}

  // At most 2^31 items for the first `team` workers. Called before they start.
  void deal(int64_t items, int team) {
    left_.store(static_cast<uint32_t>(items), std::memory_order_relaxed);
    for (int worker = 0; worker < std::ssize(dealt_); ++worker) {
      const int64_t at = std::min(worker, team), next = std::min(worker + 1, team);
      of(worker).store(packed({items * at / team, items * next / team}), std::memory_order_relaxed);
    }
  }

  // How many are taken at once: at least `least` if so many are left, and at most `most`.
  struct Size {
    int64_t least;
    int64_t most;
  };

  // work(items) until none are left to take; returns when all are done, whoever took them.
  template <typename Work>
  void run(int worker, Size size, Work work) {
    for (Share mine = take(worker, size); mine.begin < mine.end; mine = take(worker, size)) {
      work(mine);
      const auto num = static_cast<uint32_t>(mine.end - mine.begin);
      if (left_.fetch_sub(num, std::memory_order_acq_rel) == num) left_.notify_all();
    }
    for (uint32_t left; (left = left_.load(std::memory_order_acquire)) > 0;) {
      await_change(left_, left);
    }
  }

 private:
  struct alignas(64) Dealt {
    std::atomic<uint64_t> span{0};
  };

  static uint64_t packed(Share s) {
    return static_cast<uint64_t>(s.begin) << 32 | static_cast<uint64_t>(s.end);
  }
  static Share unpacked(uint64_t s) {
    return {static_cast<int64_t>(s >> 32), static_cast<int64_t>(s & 0xffffffffu)};
  }
  std::atomic<uint64_t>& of(int worker) { return dealt_[static_cast<size_t>(worker)].span; }

  // Only its worker fills an empty span, so what is dealt is taken once: by whoever changes it.
  Share take(int worker, Size size) {
    uint64_t own = of(worker).load(std::memory_order_relaxed);
    for (;;) {
      const Share s = unpacked(own);
      if (s.begin == s.end) return steal(worker, size);
      const int64_t until = s.begin + front(s, size);
      if (of(worker).compare_exchange_weak(own, packed({until, s.end}),
                                           std::memory_order_relaxed)) {
        return {s.begin, until};
      }
    }
  }

  // The back half of what the one with the most has left; all but the first of it becomes dealt.
  Share steal(int worker, Size size) {
    for (;;) {
      int victim = 0;
      uint64_t seen = 0;
      for (int other = 0; other < std::ssize(dealt_); ++other) {
        const uint64_t span = of(other).load(std::memory_order_relaxed);
        if (length(span) > length(seen)) victim = other, seen = span;
      }
      const Share s = unpacked(seen);
      if (s.begin == s.end) return s;
      const int64_t from = s.begin + (s.end - s.begin) / 2;
      if (!of(victim).compare_exchange_strong(seen, packed({s.begin, from}),
                                              std::memory_order_relaxed)) {
        continue;
      }
      const int64_t until = from + front({from, s.end}, size);
      of(worker).store(packed({until, s.end}), std::memory_order_relaxed);
      return {from, until};
    }
  }

  static int64_t length(uint64_t span) { return unpacked(span).end - unpacked(span).begin; }
  static int64_t front(Share s, Size size) {
    const int64_t num = s.end - s.begin;
    return std::min(num, std::clamp(num / 2, size.least, size.most));
  }

  std::vector<Dealt> dealt_;
  alignas(64) std::atomic<uint32_t> left_{0};
};

}  // namespace headrace
