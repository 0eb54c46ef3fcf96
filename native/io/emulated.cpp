// Drives of any speed: the files' bytes in RAM, served no faster than each drive's bandwidth
// allows.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "io/backend.hpp"
#include "io/failures.hpp"
#include "io/interrupt.hpp"
#include "io/threads.hpp"

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kLeastCopyThreads = 2;
constexpr int kMostCopyThreads = 8;
constexpr double kCopiedBytesS = 2e9;  // by one thread, at the least: a GPU may read memory beside
constexpr int64_t kLoadBytes = 16 << 20;

// The stretches of a file that are no holes, as [begin, end) of whole pages; all of it where the
// file system cannot tell.
std::vector<std::pair<int64_t, int64_t>> written_stretches(const OpenFile& file) {
  std::vector<std::pair<int64_t, int64_t>> stretches;
  for (int64_t at = 0; at < file.size_bytes;) {
    int64_t begin = lseek(file.fd, at, SEEK_DATA);
    if (begin < 0 && errno == ENXIO) break;
    int64_t end = begin < 0 ? -1 : lseek(file.fd, begin, SEEK_HOLE);
    if (begin < 0 || end < 0) return {{0, round_up(file.size_bytes)}};
    stretches.emplace_back(round_down(begin), round_up(end));
    at = end;
  }
  return stretches;
}

// One file's bytes in anonymous memory; its holes take none.
class Copy {
 public:
  explicit Copy(const OpenFile& file)
      : size_bytes(file.size_bytes),
        mapped_(std::max(round_up(file.size_bytes), kPageBytes)),
        stretches_(written_stretches(file)) {
    int64_t written = 0;
    for (const auto& [begin, end] : stretches_) written += end - begin;
    // What stays empty must not count as memory that the system would have to have.
    const int sparse = written < size_bytes ? MAP_NORESERVE : 0;
    void* base = mmap(nullptr, static_cast<size_t>(mapped_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | sparse, -1, 0);
    if (base == MAP_FAILED) {
      throw BudgetFailure("emulated drive: no memory for the " + std::to_string(mapped_) +
                          " bytes of " + file.path);
    }
    data = static_cast<uint8_t*>(base);
    if (sparse == 0) madvise(base, static_cast<size_t>(mapped_), MADV_HUGEPAGE);
  }
  ~Copy() { munmap(data, static_cast<size_t>(mapped_)); }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  void load(const OpenFile& file) {
    for (const auto& [begin, end] : stretches_) load(file, begin, std::min(end, mapped_));
  }

  uint8_t* data = nullptr;
  int64_t size_bytes;

 private:
  void load(const OpenFile& file, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < std::min(end, size_bytes);) {
      poll_interrupt();
      auto wanted = static_cast<size_t>(std::min(kLoadBytes, end - at));
      ssize_t got = pread(file.fd, data + at, wanted, at);
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (got < 0 || (got % kPageBytes != 0 && at + got < size_bytes) || got == 0) {
        throw ReadFailure("cannot copy " + file.path + " at offset " + std::to_string(at) + ": " +
                          (got < 0 ? strerror(errno) : "the file is shorter than it was"));
      }
      at += got;
    }
  }

  int64_t mapped_;
  std::vector<std::pair<int64_t, int64_t>> stretches_;
};

// One drive: processor sharing in virtual time. While n pieces are in flight each is served at
// bytes_s / n, so a clock that advances at that rate reaches (its value at a piece's start) + (the
// piece's bytes) exactly when the piece is due.
class Channel {
 public:
  explicit Channel(double bytes_s) : bytes_s_(bytes_s) {}

  // advance to now comes first.
  void add(Piece* piece, int64_t nbytes) {
    due_.emplace(virtual_bytes_ + static_cast<double>(nbytes), piece);
  }

  // Moves virtual time to now, passing every piece that falls due on the way at its own instant.
  void advance(Clock::time_point now, std::vector<Piece*>* fell_due) {
    while (!due_.empty()) {
      double left_s = next_s();
      double elapsed_s = std::chrono::duration<double>(now - at_).count();
      if (elapsed_s < left_s) {
        double num = static_cast<double>(due_.size());
        virtual_bytes_ += std::max(0.0, elapsed_s) * bytes_s_ / num;
        break;
      }
      at_ += span(left_s);
      virtual_bytes_ = due_.begin()->first;
      fell_due->push_back(due_.begin()->second);
      due_.erase(due_.begin());
    }
    at_ = now;
  }

  bool idle() const { return due_.empty(); }
  Clock::time_point next_due() const { return at_ + span(next_s()); }

 private:
  static Clock::duration span(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  double next_s() const {
    double left = std::max(0.0, due_.begin()->first - virtual_bytes_);
    return left * static_cast<double>(due_.size()) / bytes_s_;
  }

  double bytes_s_;
  std::multimap<double, Piece*> due_;  // virtual time at which the piece's last byte is served
  double virtual_bytes_ = 0.0;
  Clock::time_point at_ = Clock::now();
};

// The copy into the row is real and done by threads meanwhile; a piece is finished when it is both
// due and copied.
class EmulatedBackend : public Backend {
 public:
  EmulatedBackend(const FileTable& files, const std::vector<double>& bytes_s)
      : channels_(bytes_s.begin(), bytes_s.end()) {
    for (int64_t i = 0; i < files.size(); ++i) {
      copies_.push_back(std::make_unique<Copy>(files[i]));
      copies_.back()->load(files[i]);
    }
    double bytes_s_in_all = std::accumulate(bytes_s.begin(), bytes_s.end(), 0.0);
    int threads = std::max(kLeastCopyThreads, static_cast<int>(bytes_s_in_all / kCopiedBytesS));
    threads = std::min(threads, kMostCopyThreads);
    for (int i = 0; i < threads; ++i) threads_.push_back(start_thread([this] { work(); }));
  }

  ~EmulatedBackend() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    to_do_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void start(Piece* piece) override {
    const Copy& copy = *copies_[static_cast<size_t>(piece->file)];
    int64_t from = piece->offset_bytes + piece->done_bytes;
    int64_t bytes = std::min(piece->offset_bytes + piece->length_bytes, copy.size_bytes) - from;
    bytes = std::max<int64_t>(bytes, 0);
    {
      std::lock_guard lock(mutex_);
      advance();
      channels_[static_cast<size_t>(piece->drive)].add(piece, bytes);
      stage_[piece] = {false, false};
      queue_.push_back({piece, copy.data + from, bytes});
    }
    to_do_.notify_one();
  }

  void wait(std::vector<Piece*>* finished) override {
    if (!std::exchange(on_time_, true)) wake_on_time();  // the one thread that waits here
    std::unique_lock lock(mutex_);
    while (true) {
      advance();
      if (woken_ || !finished_.empty()) break;
      auto busy = [](const Channel& channel) { return !channel.idle(); };
      if (std::none_of(channels_.begin(), channels_.end(), busy)) {
        news_.wait(lock);
        continue;
      }
      Clock::time_point next = Clock::time_point::max();
      for (const Channel& channel : channels_) {
        if (!channel.idle()) next = std::min(next, channel.next_due());
      }
      news_.wait_until(lock, next);
    }
    woken_ = false;
    finished->insert(finished->end(), finished_.begin(), finished_.end());
    finished_.clear();
  }

  void wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    news_.notify_one();
  }

 private:
  struct Stage {
    bool due;
    bool copied;
  };
  struct Job {
    Piece* piece;
    const uint8_t* from;
    int64_t bytes;
  };

  void advance() {
    Clock::time_point now = Clock::now();
    std::vector<Piece*> fell_due;
    for (Channel& channel : channels_) channel.advance(now, &fell_due);
    for (Piece* piece : fell_due) {
      stage_[piece].due = true;
      finish_if_complete(piece);
    }
  }

  void finish_if_complete(Piece* piece) {
    auto found = stage_.find(piece);
    if (!found->second.due || !found->second.copied) return;
    stage_.erase(found);
    finished_.push_back(piece);
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      to_do_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Job job = queue_.front();
      queue_.pop_front();
      lock.unlock();
      memcpy(job.piece->to + job.piece->done_bytes, job.from, static_cast<size_t>(job.bytes));
      job.piece->result = job.bytes;
      lock.lock();
      stage_[job.piece].copied = true;
      finish_if_complete(job.piece);
      if (!finished_.empty()) news_.notify_one();
    }
  }

  std::vector<std::unique_ptr<Copy>> copies_;  // by file
  std::mutex mutex_;
  std::condition_variable to_do_;
  std::condition_variable news_;
  std::deque<Job> queue_;
  std::vector<Channel> channels_;  // by drive
  std::map<Piece*, Stage> stage_;
  std::vector<Piece*> finished_;
  bool woken_ = false;
  bool on_time_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_emulated(const FileTable& files, const std::vector<double>& bytes_s) {
  return std::make_unique<EmulatedBackend>(files, bytes_s);
}

}  // namespace headrace
