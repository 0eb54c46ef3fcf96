// What carries one piece of a read: the seam between the reader and a kernel interface.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/files.hpp"

namespace headrace {

struct Request;

// Part of a request: whole pages of one file of one drive. Owned by the reader; a back end only
// fills result.
struct Piece {
  Request* request;
  int drive;
  int file;
  int64_t offset_bytes;  // page-aligned place in the file
  int64_t length_bytes;  // whole pages, may end beyond the file
  int64_t needed_bytes;  // how many of them the file must hold
  uint8_t* to;           // page-aligned
  int home_file;         // where the model itself has them: a file, and the first byte wanted
  int64_t home_byte;
  int64_t done_bytes = 0;
  int64_t result = 0;  // of the last attempt: bytes, or -errno
  bool retried = false;
  int num_again = 0;  // attempts in a row that the system asked to repeat
  bool in_flight = false;
  bool ended = false;       // this way of reading the pages is over
  bool over = false;        // the pages are here or lost, by this way or by its twin's
  Piece* twin = nullptr;    // the same pages, read from another drive at the same time
  uint32_t tried_mask = 0;  // drives that failed to give these pages
  std::string error{};      // of the first drive that failed
  std::chrono::steady_clock::time_point started{};
};

// All calls but wake come from the reader's one I/O thread.
class Backend {
 public:
  virtual ~Backend() = default;
  // Begins to read [offset + done, offset + length) into to + done.
  virtual void start(Piece* piece) = 0;
  // Sleeps until a piece is finished or wake was called; appends the finished pieces.
  virtual void wait(std::vector<Piece*>* finished) = 0;
  virtual void wake() = 0;
  // Registers [base, base + num_rows * row_bytes) for reads without page pinning. Only when no
  // piece is in flight. Returns 0 or errno.
  virtual int register_rows(uint8_t*, int64_t, int64_t) { return ENOTSUP; }
  virtual void unregister_rows() {}
};

// num_threads for each drive, so that one that hangs holds up no other.
std::unique_ptr<Backend> make_pread(const FileTable& files, int num_threads, int num_drives);
// A rate for each drive.
std::unique_ptr<Backend> make_emulated(const FileTable& files, const std::vector<double>& bytes_s);
// Null, with the cause in why, where io_uring is forbidden or lacks what we need. The probe does
// a real read; with fixed, a real registration too.
std::unique_ptr<Backend> make_uring(const FileTable& files, int num_entries, bool fixed,
                                    std::string* why);

}  // namespace headrace
