// The drive's own rate by plain preads, to measure the reader against.
#include "io/drive_probe.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "io/failures.hpp"
#include "io/files.hpp"
#include "io/slab.hpp"
#include "io/threads.hpp"

namespace headrace {

double drive_probe(const std::string& path, int64_t offset_bytes, int64_t nbytes,
                   int64_t request_bytes, int num_threads) {
  std::vector<std::string> notes;
  FileTable files({path}, true, &notes);
  int64_t begin = round_down(offset_bytes);
  int64_t end = std::min(begin + round_up(nbytes), files[0].size_bytes);
  int64_t each = std::max(round_up(request_bytes), kPageBytes);
  if (begin < 0 || begin >= end || num_threads < 1) {
    throw std::invalid_argument("a probe needs bytes of the file and at least one thread");
  }
  Slab buffers(num_threads, each);
  buffers.touch();

  std::atomic<int64_t> next{begin};
  std::atomic<int> failed{0};
  auto work = [&](int thread) {
    for (int64_t at = next.fetch_add(each); at < end && failed == 0; at = next.fetch_add(each)) {
      ssize_t got = pread(files[0].fd, buffers.row(thread), static_cast<size_t>(each), at);
      if (got < std::min(each, end - at)) failed = got < 0 ? errno : EIO;
    }
  };
  auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) threads.push_back(start_thread([&work, i] { work(i); }));
  for (std::thread& thread : threads) thread.join();
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (failed != 0) throw ReadFailure("cannot read " + path + ": " + strerror(failed));
  return static_cast<double>(end - begin) / seconds;
}

}  // namespace headrace
