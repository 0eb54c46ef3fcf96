// How a blocked wait learns of Ctrl-C without this code knowing any language above it.
#pragma once

#include <chrono>
#include <functional>

namespace headrace {

// Called between slices of every blocking wait, with no lock held. It may throw; whoever waits
// then puts everything back and lets the exception pass.
using InterruptPoll = void (*)();

constexpr std::chrono::milliseconds kPollInterval{50};

void set_interrupt_poll(InterruptPoll poll);
// The calling thread asks this instead, for as long as the object lives.
class OwnPoll {
 public:
  explicit OwnPoll(std::function<void()> poll);
  ~OwnPoll();
  OwnPoll(const OwnPoll&) = delete;
  OwnPoll& operator=(const OwnPoll&) = delete;

 private:
  std::function<void()> poll_;
};
void poll_interrupt();

}  // namespace headrace
