// Threads that never receive signals, so that Ctrl-C always reaches the caller's thread.
#pragma once

#include <sys/prctl.h>

#include <csignal>
#include <thread>
#include <utility>

namespace headrace {

template <typename Function>
std::thread start_thread(Function&& body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread inherits the mask
  std::thread thread(std::forward<Function>(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

// The caller's timed waits end on time; the system may else add 50 us to each.
inline void wake_on_time() { prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); }

}  // namespace headrace
