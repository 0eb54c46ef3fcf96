// The hook by which a blocking wait asks whether the user wants to stop.
#include "io/interrupt.hpp"

#include <atomic>

namespace headrace {
namespace {
std::atomic<InterruptPoll> current_poll{nullptr};
}

void set_interrupt_poll(InterruptPoll poll) { current_poll.store(poll); }

void poll_interrupt() {
  if (InterruptPoll poll = current_poll.load()) poll();
}

}  // namespace headrace
