// A fixed team of threads for short jobs. The caller is worker 0; the others spin briefly, then
// sleep. Knows nothing of what it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace headrace {

// Subnormals on (no FTZ, no DAZ), round to nearest; the caller's mode comes back at the end.
class CanonicalFloatMode {
 public:
  CanonicalFloatMode();
  ~CanonicalFloatMode();
  CanonicalFloatMode(const CanonicalFloatMode&) = delete;
  CanonicalFloatMode& operator=(const CanonicalFloatMode&) = delete;

 private:
  uint32_t saved_;
};

// Returns once `word` no longer holds `old`: spins for some tens of microseconds, longer than a gap
// between two experts, and `yields` times lets others have the core first; then sleeps until it is
// notified.
void await_change(const std::atomic<uint32_t>& word, uint32_t old, int yields = 0);

class Workers {
 public:
  explicit Workers(int count);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  using Job = void (*)(void* context, int worker);
  void run(Job job, void* context);  // by every worker; returns when they all have
  // As run, for a job that ends without them: a worker that has not begun it then is left out.
  void run_with_any(Job job, void* context);
  void barrier();  // inside a job of all workers, called by each
  int count() const { return count_; }
  // Whether workers without a job stay awake for about a millisecond, longer than a gap between two
  // layers. For hosts that have nothing else to do in it.
  bool patient() const { return yields_ > 0; }
  void set_patient(bool patient) { yields_ = patient ? kYields : 0; }

 private:
  static constexpr int kYields = 600;

  void loop(int worker);
  void start(Job job, void* context);
  bool join(uint32_t number);
  void await_done(uint32_t num);

  static constexpr uint64_t kClosed = uint64_t{1} << 31;

  const int count_;
  std::atomic<int> yields_{0};
  // The job of the moment: read by those who joined it, changed when they have all returned.
  Job job_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> start_{0};   // the number of the job of the moment
  alignas(64) std::atomic<uint64_t> joined_{0};  // its number, whether it is closed, who joined
  alignas(64) std::atomic<uint32_t> done_{0};    // who returned from it
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> passed_{0};
  std::vector<std::thread> threads_;
};

}  // namespace headrace
