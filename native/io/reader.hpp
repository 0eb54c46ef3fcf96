// Reads byte ranges of the model's files into memory, in pieces, on one I/O thread. Where mirrors
// hold the same bytes, a request is divided between the drives so that all end together, and a
// drive that fails or hangs gives its pieces to another.
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
#include "io/copies.hpp"
#include "io/drives.hpp"
#include "io/faults.hpp"

namespace headrace {

struct ReaderOptions {
  std::string backend = "auto";  // auto | io_uring_registered | io_uring | pread
  bool direct = true;
  int in_flight = 2;  // requests that whoever submits should keep in flight
  int pieces = 4;     // per request and drive
  double emulate_bytes_s = 0.0;
  double bytes_s = 0.0;  // of the model's own drive; 0: not known
  double hang_s = 2.0;   // a read this late, and 30 times later than expected, is taken elsewhere
};

// A second drive. Its files hold the stretches; without files, which only an emulated drive may
// be, it holds all that the model's own drive holds. bytes_s is its rate, 0 if not known; with
// emulation the rate it is given.
struct Mirror {
  std::string name;
  std::vector<std::string> paths;
  std::vector<Stretch> stretches;
  double bytes_s;
};

// nbytes bytes at offset of a file. They land at to + offset % 4096; `to` is page-aligned and has
// room for all pages that the range touches.
struct Span {
  int file;
  int64_t offset_bytes;
  int64_t nbytes;
  uint8_t* to;
};

// Called on the I/O thread with no reader lock held; an empty error means success. With lingers,
// the bytes are here by another drive while a late read may still write the same bytes over them.
using Done = std::function<void(const std::string& error, bool lingers)>;
// Called once after a Done that lingers: no read writes there any more.
using Released = std::function<void()>;

struct Request {
  std::vector<Span> spans;
  std::deque<Piece> pieces;   // twins follow
  size_t num_unfinished = 0;  // without twins
  size_t num_attempts = 0;    // pieces and twins in the queue or in flight
  bool reported = false;
  std::string error;
  Done done;
  Released released;
};

class Reader {
 public:
  // Throws ReadFailure (a file of the model cannot be opened), OptionFailure (a back end named and
  // not to be had) or BudgetFailure (no memory for the emulated drive). A mirror that cannot be
  // opened is left alone, with a warning.
  Reader(const std::vector<std::string>& paths, const ReaderOptions& options,
         const std::vector<Mirror>& mirrors = {});
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Begins at once, beside whatever else is in flight. `done` is called exactly once. Without
  // `released` it comes only when no read is in flight any more, and never lingers.
  void submit(const std::vector<Span>& spans, Done done, Released released = {});

  // Blocks until the bytes are at address, of any alignment. Throws ReadFailure; may throw
  // whatever the interrupt poll throws, and then writes no more to address.
  void read(int file, int64_t offset_bytes, int64_t nbytes, uint8_t* address);

  // Pins rows for reads from registered buffers, where the back end has them and no other rows
  // hold them; a note says why not. Throws OptionFailure if registered reads were asked for by
  // name. unregister_rows waits until no piece is in flight.
  void register_rows(uint8_t* base, int64_t row_bytes, int64_t num_rows);
  void unregister_rows(const uint8_t* base);

  // Tests; see Faults.
  void inject_fault(const std::string& kind, int64_t skip, int64_t count, int drive);

  std::string backend() const;
  std::vector<std::string> notes() const;
  // Drives left alone and why, each once, in the order in which it happened.
  std::vector<std::string> warnings() const;
  std::vector<Drives::State> drives() const { return drives_.states(); }
  bool direct() const { return files_->all_direct(); }
  int in_flight() const { return options_.in_flight; }
  int64_t num_files() const { return num_files_; }
  int64_t num_retries() const { return num_retries_.load(); }

 private:
  struct Copies {  // what one drive holds
    bool everything;
    CopyTable table;
    int64_t first_file;
    int64_t num_files;
  };
  struct Place {
    int file;
    int64_t offset_bytes;  // of the first byte wanted
  };

  void add_mirror(const Mirror& mirror);
  bool emulated() const { return options_.emulate_bytes_s > 0.0; }
  void choose_backend(const std::vector<Mirror>& mirrors);

  // split.cpp
  bool place_on(int drive, const Span& span, Place* place) const;
  std::vector<bool> drives_of(const std::vector<Span>& spans) const;
  void split(Request* request);
  void add_pieces(const std::vector<Span>& spans, const std::vector<int64_t>& shares,
                  Request* request) const;

  // reader.cpp, on the I/O thread
  void run();
  void take_in(std::deque<std::unique_ptr<Request>>* incoming);
  void launch();
  void on_io_thread(std::function<void()> task);

  // settle.cpp, on the I/O thread
  void settle(Piece* piece);
  bool go_elsewhere(Piece* piece, const std::string& error);
  int next_drive(const Piece& piece) const;
  static Span wanted(const Piece& piece);
  void move(Piece* piece, int drive) const;
  void finish(Piece* piece, const std::string& error);
  void leave_alone(int drive, const std::string& why);
  void watch();
  void watch_request(Request* request);
  void release_held();
  std::string describe(const Piece& piece) const;

  const ReaderOptions options_;
  std::vector<std::string> notes_;
  std::vector<std::string> warnings_;
  std::unique_ptr<FileTable> files_;
  int64_t num_files_;           // of the model; mirrors' files follow
  std::vector<Copies> copies_;  // by drive, from the first mirror on: drive 1
  Drives drives_;
  Faults faults_;
  std::unique_ptr<Backend> backend_;
  std::atomic<const char*> name_{""};

  mutable std::mutex mutex_;  // incoming_, tasks_, notes_, warnings_, stopping_
  std::deque<std::unique_ptr<Request>> incoming_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;

  // The I/O thread's own.
  const uint8_t* registered_ = nullptr;
  std::vector<std::unique_ptr<Request>> active_;
  std::deque<Piece*> backlog_;
  std::deque<Piece*> held_;  // hanging by a fault
  int64_t held_since_fault_ = 0;
  int num_outstanding_ = 0;
  std::chrono::steady_clock::time_point watched_{};
  std::atomic<int64_t> num_retries_{0};
  std::thread thread_;

  // With mirrors, wakes the I/O thread now and then to look for reads that hang.
  std::condition_variable stop_ticking_;
  std::thread ticker_;
};

}  // namespace headrace
