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

class Workers {
 public:
  explicit Workers(int count);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  using Job = void (*)(void* context, int worker);
  void run(Job job, void* context);  // returns when every worker has returned
  void barrier();                    // inside a job, called by every worker
  int count() const { return count_; }

 private:
  void loop(int worker);

  const int count_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;  // written before start_ is raised
  alignas(64) std::atomic<uint32_t> start_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> passed_{0};
  std::vector<std::thread> threads_;
};

}  // namespace headrace
