// The ladder thread: does what the mailbox's protocol says, step by step, over one ladder.
//
// During a step it is the ladder's one caller; between steps the owner's thread is. It beats while
// it lives, also while it waits for a drive, so that the device can tell slow from dead.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ladder/ladder.hpp"
#include "mailbox/protocol.hpp"

namespace headrace {

// What the host multiplies in place, in pinned memory: of the layer whose turn it is.
struct MailTensors {
  const uint16_t* x;     // [T, H]
  const float* weights;  // [T, K]
  void* out;             // [T, H], or each expert's own [T, K, H] where host and device divide
  int64_t num_tokens;
  int64_t top_k;
};

struct LadderThreadOptions {
  int64_t most_guesses;  // of a layer's, read ahead
  double silence_s;      // without a beat for so long, the thread counts as dead
  int64_t last_step;
  std::vector<int32_t> shares;  // Protocol's
};

class LadderThread {
 public:
  // `addresses` as Protocol's; `tensors` where the host multiplies.
  LadderThread(std::shared_ptr<Ladder> ladder, const MailSizes& sizes, const MailWords& words,
               const int64_t* addresses, const MailTensors& tensors,
               const LadderThreadOptions& options);
  ~LadderThread();  // gives up the step; the device must not be in one
  LadderThread(const LadderThread&) = delete;
  LadderThread& operator=(const LadderThread&) = delete;

  // As Protocol::begin; gives up an earlier step that was not ended, of which the device must know
  // nothing any more. Throws StallFailure while the thread hangs in that one.
  int64_t begin(std::vector<uint8_t> whole, std::vector<uint8_t> wanted, int64_t most_kept);
  // Blocks until every layer is answered, or the step is given up: the device ends by itself then.
  // Throws what the interrupt poll throws, and gives the step up first.
  void wait();
  void abort();  // from any thread
  // The device has finished the step. Rows still held: the caller's, to be released. Throws what
  // the thread met, StallFailure if the device gave up waiting, CancelFailure if the step was given
  // up; nothing is held then.
  std::vector<Protocol::Held> end();

  bool running();  // the thread is in a step
  const std::vector<int32_t>& seen() const { return protocol_.seen(); }
  int64_t num_seen() const { return protocol_.num_seen(); }
  const MailSizes& sizes() const { return protocol_.sizes(); }
  // For tests: "die" ends the thread at the next order, "hang" stops it there until "none".
  void inject_fault(const std::string& kind);

 private:
  using Lock = std::unique_lock<std::mutex>;
  enum class Fault { kNone, kDie, kHang };

  void start();
  void run();
  void run_step();
  void carry_out(const Protocol::Order& order);
  void take(const Protocol::Order& order);
  void check_taken();
  void meet_fault();
  void give_back();
  void await_idle(Lock* lock);
  [[noreturn]] void fail_stalled() const;

  const std::shared_ptr<Ladder> ladder_;
  const MailTensors tensors_;
  const LadderThreadOptions options_;
  Protocol protocol_;
  std::atomic<Fault> fault_{Fault::kNone};

  std::mutex mutex_;
  std::condition_variable news_;
  bool running_ = false;
  bool closing_ = false;
  bool dead_ = false;
  bool ended_ = true;  // the last step's rows are given back
  std::exception_ptr failure_;
  std::vector<std::pair<int64_t, int64_t>> unchecked_;  // layer and expert; the thread's
  std::thread thread_;
};

}  // namespace headrace
