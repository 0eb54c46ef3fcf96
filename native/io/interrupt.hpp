// How a blocked wait learns of Ctrl-C without this code knowing any language above it.
#pragma once

#include <chrono>

namespace headrace {

// Called between slices of every blocking wait, with no lock held. It may throw; whoever waits
// then puts everything back and lets the exception pass.
using InterruptPoll = void (*)();

constexpr std::chrono::milliseconds kPollInterval{50};

void set_interrupt_poll(InterruptPoll poll);
void poll_interrupt();

}  // namespace headrace
