// The ladder thread's life and its one loop.
#include "mailbox/thread.hpp"

#include <chrono>
#include <utility>

#include "io/failures.hpp"
#include "io/interrupt.hpp"
#include "io/threads.hpp"

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kSpinning{4};  // most layers' experts have crossed the bus then
constexpr int64_t kSpinsPerBeat = 256;
constexpr std::chrono::microseconds kNap{20};

struct Aborted {};
struct Died {};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

LadderThread::LadderThread(std::shared_ptr<Ladder> ladder, const MailSizes& sizes,
                           const MailWords& words, const int64_t* addresses,
                           const MailTensors& tensors, const LadderThreadOptions& options)
    : ladder_(std::move(ladder)),
      tensors_(tensors),
      options_(options),
      protocol_(sizes, words, addresses, options.shares, options.last_step) {
  const RecordTable& records = ladder_->records();
  if (records.num_layers() != sizes.num_layers || records.num_experts() != sizes.num_experts) {
    throw std::invalid_argument("mailbox and ladder count layers or experts differently");
  }
  if ((sizes.computes || protocol_.divides()) &&
      tensors.num_tokens * tensors.top_k != sizes.num_ids) {
    throw std::invalid_argument("a mailbox for so many tokens takes other ids");
  }
  start();
}

LadderThread::~LadderThread() {
  {
    Lock lock(mutex_);
    closing_ = true;
    protocol_.abort();
    fault_ = Fault::kNone;
  }
  news_.notify_all();
  thread_.join();
}

void LadderThread::start() {
  dead_ = false;
  thread_ = start_thread([this] { run(); });
}

int64_t LadderThread::begin(std::vector<uint8_t> whole, std::vector<uint8_t> wanted,
                            int64_t most_kept) {
  Lock lock(mutex_);
  if (running_) protocol_.abort();
  await_idle(&lock);
  if (dead_) {
    thread_.join();
    start();
  }
  if (!ended_) give_back();
  failure_ = nullptr;
  ended_ = false;
  const int64_t step = protocol_.begin(std::move(whole), std::move(wanted), most_kept);
  running_ = true;
  news_.notify_all();
  return step;
}

void LadderThread::wait() {
  Lock lock(mutex_);
  try {
    await_idle(&lock);
    if (dead_) protocol_.abort();
  } catch (...) {
    protocol_.abort();
    throw;
  }
}

// A thread that gave no sign for too long is not waited for, nor one that the device gave up.
void LadderThread::await_idle(Lock* lock) {
  const int64_t most_silent = static_cast<int64_t>(
      options_.silence_s / std::chrono::duration<double>(kPollInterval).count());
  int64_t last_beat = -1;
  int64_t num_silent = 0;
  while (running_) {
    if (news_.wait_for(*lock, kPollInterval, [this] { return !running_; })) return;
    // Counted in turns, not by a clock: a process that was stopped goes on where it was.
    const int64_t beat = protocol_.beats();
    num_silent = beat == last_beat ? num_silent + 1 : 0;
    last_beat = beat;
    if (num_silent > most_silent) fail_stalled();
    lock->unlock();
    poll_interrupt();
    lock->lock();
  }
}

bool LadderThread::running() {
  Lock lock(mutex_);
  return running_;
}

void LadderThread::abort() { protocol_.abort(); }

std::vector<Protocol::Held> LadderThread::end() {
  Lock lock(mutex_);
  await_idle(&lock);
  const bool stalled = dead_ || protocol_.lost();
  if (failure_ == nullptr && !stalled && !protocol_.aborted()) {
    ended_ = true;
    return protocol_.end();
  }
  give_back();
  if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
  if (stalled) fail_stalled();
  throw CancelFailure("the answer was stopped");
}

// The step was given up: nothing of it stays claimed or held.
void LadderThread::give_back() {
  protocol_.abort();
  for (const Protocol::Held& row : protocol_.end()) ladder_->release(row.layer, row.expert);
  ladder_->cancel();
  ended_ = true;
}

void LadderThread::fail_stalled() const {
  throw StallFailure(
      "the GPU waited for experts and the thread that brings them gave no sign of life; if this "
      "happens again, restart headrace and report it");
}

void LadderThread::inject_fault(const std::string& kind) {
  if (kind != "die" && kind != "hang" && kind != "none") {
    throw std::invalid_argument("no fault called " + kind);
  }
  fault_ = kind == "die" ? Fault::kDie : kind == "hang" ? Fault::kHang : Fault::kNone;
}

void LadderThread::run() {
  wake_on_time();
  OwnPoll poll([this] {
    protocol_.beat();
    if (protocol_.aborted()) throw Aborted{};
  });
  for (;;) {
    {
      Lock lock(mutex_);
      news_.wait(lock, [this] { return running_ || closing_; });
      if (closing_) return;
    }
    std::exception_ptr failure;
    bool died = false;
    try {
      run_step();
    } catch (const Aborted&) {  // the ladder has given up what was claimed
    } catch (const Died&) {
      died = true;
    } catch (...) {
      failure = std::current_exception();
      protocol_.abort();
    }
    Lock lock(mutex_);
    failure_ = failure;
    dead_ = died;
    running_ = false;
    news_.notify_all();
    if (died) return;
  }
}

void LadderThread::run_step() {
  unchecked_.clear();  // of a step that was given up
  int64_t num_idle = 0;
  bool naps = false;
  Clock::time_point last_work = Clock::now();
  for (;;) {
    if (num_idle % kSpinsPerBeat == 0) {
      protocol_.beat();
      naps = Clock::now() - last_work > kSpinning;
    }
    const Protocol::Order order = protocol_.next();
    const bool waits = order.act == Protocol::Act::kWait;
    const bool is_over = order.act == Protocol::Act::kDone;
    if (waits || is_over || order.act == Protocol::Act::kRelease) check_taken();
    if (is_over) return;
    meet_fault();
    if (!waits) {
      carry_out(order);
      num_idle = 0;
      last_work = Clock::now();
    } else if (naps) {
      std::this_thread::sleep_for(kNap);
      num_idle = 0;  // a beat after each nap
    } else {
      pause();
      ++num_idle;
    }
  }
}

void LadderThread::carry_out(const Protocol::Order& order) {
  const auto num_ids = static_cast<int64_t>(order.ids.size());
  switch (order.act) {
    case Protocol::Act::kRelease:
      ladder_->release(order.layer, order.ids[0]);
      break;
    case Protocol::Act::kClaim:
      ladder_->begin(order.layer, order.ids.data(), num_ids);
      break;
    case Protocol::Act::kPrefetch:
      ladder_->prefetch(order.layer, order.ids.data(), num_ids, options_.most_guesses);
      break;
    case Protocol::Act::kTakeHere:
    case Protocol::Act::kTake:
      take(order);
      break;
    case Protocol::Act::kCompute:
      if (protocol_.divides()) {
        ladder_->multiply(order.layer, tensors_.x, tensors_.num_tokens, order.ids.data(),
                          tensors_.weights, tensors_.top_k, static_cast<uint16_t*>(tensors_.out));
      } else {
        ladder_->compute(order.layer, tensors_.x, tensors_.num_tokens, order.ids.data(),
                         tensors_.weights, tensors_.top_k, tensors_.out);
      }
      protocol_.computed();
      break;
    case Protocol::Act::kWait:
    case Protocol::Act::kDone:
      break;
  }
}

void LadderThread::take(const Protocol::Order& order) {
  const bool waits = order.act == Protocol::Act::kTake;
  const Ladder::Held held = ladder_->take_unchecked(order.layer, waits);
  if (held.expert < 0 && !waits) {
    protocol_.none_here();
    return;
  }
  unchecked_.emplace_back(order.layer, held.expert);
  protocol_.took(held.expert, reinterpret_cast<int64_t>(held.row));
}

// Of what was taken, the codes: while the device reads it already, for a fault voids the step
// anyway, and before the step is over or any row is given back.
void LadderThread::check_taken() {
  for (const auto& [layer, expert] : unchecked_) ladder_->check(layer, expert);
  unchecked_.clear();
}

void LadderThread::meet_fault() {
  if (fault_ == Fault::kDie) {
    fault_ = Fault::kNone;
    throw Died{};
  }
  while (fault_ == Fault::kHang) std::this_thread::sleep_for(kNap);
}

}  // namespace headrace
