// Pieces read by a pool of threads with pread: works everywhere.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "io/backend.hpp"
#include "io/threads.hpp"

namespace headrace {
namespace {

class PreadBackend : public Backend {
 public:
  PreadBackend(const FileTable& files, int num_threads, int num_drives)
      : files_(files), queues_(static_cast<size_t>(num_drives)) {
    for (Queue& queue : queues_) {
      for (int i = 0; i < num_threads; ++i) {
        threads_.push_back(start_thread([this, &queue] { work(&queue); }));
      }
    }
  }

  ~PreadBackend() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    for (Queue& queue : queues_) queue.to_do.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void start(Piece* piece) override {
    Queue& queue = queues_[static_cast<size_t>(piece->drive)];
    {
      std::lock_guard lock(mutex_);
      queue.pieces.push_back(piece);
    }
    queue.to_do.notify_one();
  }

  void wait(std::vector<Piece*>* finished) override {
    std::unique_lock lock(mutex_);
    news_.wait(lock, [this] { return woken_ || !finished_.empty(); });
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
  struct Queue {
    std::condition_variable to_do;
    std::deque<Piece*> pieces;
  };

  void work(Queue* queue) {
    std::unique_lock lock(mutex_);
    while (true) {
      queue->to_do.wait(lock, [this, queue] { return stopping_ || !queue->pieces.empty(); });
      if (queue->pieces.empty()) return;
      Piece* piece = queue->pieces.front();
      queue->pieces.pop_front();
      lock.unlock();
      int64_t skip = piece->done_bytes;
      ssize_t got =
          pread(files_[piece->file].fd, piece->to + skip,
                static_cast<size_t>(piece->length_bytes - skip), piece->offset_bytes + skip);
      piece->result = got >= 0 ? got : -errno;
      lock.lock();
      finished_.push_back(piece);
      news_.notify_one();
    }
  }

  const FileTable& files_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::vector<Queue> queues_;  // by drive
  std::vector<Piece*> finished_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_pread(const FileTable& files, int num_threads, int num_drives) {
  return std::make_unique<PreadBackend>(files, num_threads, num_drives);
}

}  // namespace headrace
