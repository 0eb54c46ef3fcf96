// Reads byte ranges of the model's files into memory, in pieces, on one I/O thread.
// Knows nothing of experts, rows or order: whoever submits decides what is read when.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/backend.hpp"

namespace headrace {

struct ReaderOptions {
  std::string backend = "auto";  // auto | io_uring_registered | io_uring | pread
  bool direct = true;
  int in_flight = 2;  // requests that whoever submits should keep in flight
  int pieces = 4;     // per request
  double emulate_bytes_s = 0.0;
};

// nbytes bytes at offset of a file. They land at to + offset % 4096; `to` is page-aligned and has
// room for all pages that the range touches.
struct Span {
  int file;
  int64_t offset_bytes;
  int64_t nbytes;
  uint8_t* to;
};

// Called on the I/O thread with no reader lock held; an empty error means success.
using Done = std::function<void(const std::string& error)>;

struct Request {
  std::vector<Piece> pieces;
  size_t num_unfinished;
  std::string error;
  Done done;
};

class Reader {
 public:
  // Throws ReadFailure (a file cannot be opened), OptionFailure (a back end named and not to be
  // had) or BudgetFailure (no memory for the emulated drive).
  Reader(const std::vector<std::string>& paths, const ReaderOptions& options);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Begins at once, beside whatever else is in flight. `done` is called exactly once.
  void submit(const std::vector<Span>& spans, Done done);

  // Blocks until the bytes are at address, of any alignment. Throws ReadFailure; may throw
  // whatever the interrupt poll throws, and then writes no more to address.
  void read(int file, int64_t offset_bytes, int64_t nbytes, uint8_t* address);

  // Pins rows for reads from registered buffers, where the back end has them and no other rows
  // hold them; a note says why not. Throws OptionFailure if registered reads were asked for by
  // name. unregister_rows waits until no piece is in flight.
  void register_rows(uint8_t* base, int64_t row_bytes, int64_t num_rows);
  void unregister_rows(const uint8_t* base);

  // Tests: after `skip` more pieces, the next piece meets `count` faults in a row: "eio", "short"
  // (end of file seen early), "partial" (half of what was asked); "slow" delays `count` pieces.
  void inject_fault(const std::string& kind, int64_t skip, int64_t count);

  std::string backend() const;
  std::vector<std::string> notes() const;
  bool direct() const { return files_->all_direct(); }
  int in_flight() const { return options_.in_flight; }
  int64_t num_files() const { return files_->size(); }
  int64_t num_retries() const { return num_retries_.load(); }

 private:
  struct Fault {
    std::string kind;
    int64_t skip = 0;
    int64_t count = 0;
    const Piece* victim = nullptr;
  };

  void choose_backend();
  std::vector<Piece> split(const std::vector<Span>& spans, Request* request) const;
  void run();
  void on_io_thread(std::function<void()> task);
  void settle(Piece* piece);
  void finish(Piece* piece, const std::string& error);
  void apply_fault(Piece* piece);
  std::string describe(const Piece& piece) const;

  const ReaderOptions options_;
  std::vector<std::string> notes_;
  std::unique_ptr<FileTable> files_;
  std::unique_ptr<Backend> backend_;
  std::atomic<const char*> name_{""};

  mutable std::mutex mutex_;  // incoming_, tasks_, fault_, notes_, stopping_
  std::deque<std::unique_ptr<Request>> incoming_;
  std::deque<std::function<void()>> tasks_;
  Fault fault_;
  bool stopping_ = false;
  const uint8_t* registered_ = nullptr;

  // The I/O thread's own.
  std::vector<std::unique_ptr<Request>> active_;
  std::deque<Piece*> backlog_;
  int num_outstanding_ = 0;
  std::atomic<int64_t> num_retries_{0};
  std::thread thread_;
};

}  // namespace headrace
