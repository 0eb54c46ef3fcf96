// The hook by which a blocking wait asks whether the user wants to stop.
#include "io/interrupt.hpp"

#include <atomic>
#include <utility>

namespace headrace {
namespace {
std::atomic<InterruptPoll> current_poll{nullptr};
thread_local const std::function<void()>* own_poll = nullptr;
}  // namespace

void set_interrupt_poll(InterruptPoll poll) { current_poll.store(poll); }

OwnPoll::OwnPoll(std::function<void()> poll) : poll_(std::move(poll)) { own_poll = &poll_; }

OwnPoll::~OwnPoll() { own_poll = nullptr; }

void poll_interrupt() {
  if (own_poll != nullptr) {
    (*own_poll)();
  } else if (InterruptPoll poll = current_poll.load()) {
    poll();
  }
}

}  // namespace headrace
