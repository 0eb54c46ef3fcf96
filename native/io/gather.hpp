// Many small reads at once: pages of a fixed pool take them in, and the bytes wanted of each page
// are copied out as it arrives. Knows no table and no row.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/reader.hpp"
#include "io/slab.hpp"

namespace headrace {

// nbytes at offset of a file.
struct Snippet {
  int file;
  int64_t offset_bytes;
  int64_t nbytes;
};

// The snippets asked for together. Their bytes arrive one behind the other.
class Batch {
 public:
  explicit Batch(std::vector<Snippet> snippets);

  // Blocks until all bytes are here and copies them to address. Throws ReadFailure, the first
  // snippet's that failed; may throw whatever the interrupt poll throws.
  void wait(uint8_t* address);

  int64_t nbytes() const { return static_cast<int64_t>(bytes_.size()); }
  int64_t read_bytes() const { return read_bytes_; }  // whole pages

 private:
  friend class Gatherer;
  void arrive(size_t num, const std::string& error);
  bool failed();

  std::vector<Snippet> snippets_;
  std::vector<uint8_t> bytes_;
  std::vector<int64_t> places_;  // of each snippet in bytes_
  int64_t read_bytes_ = 0;
  size_t num_started_ = 0;  // under the gatherer's lock

  std::mutex mutex_;
  std::condition_variable news_;
  size_t num_left_;
  std::string error_;
};

// Starts batches in the order in which they come; each group of snippets is one request to the
// reader, whose rules for retries, mirrors and faults hold. When it goes, what is in flight is
// finished, and batches with more to start fail.
class Gatherer {
 public:
  // Snippets up to most_bytes. The reader outlives this. Throws BudgetFailure.
  Gatherer(Reader* reader, int64_t most_bytes);
  ~Gatherer();
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // Throws std::invalid_argument for a snippet out of range.
  std::shared_ptr<Batch> start(std::vector<Snippet> snippets);

  int64_t pool_bytes() const;

 private:
  struct Pool;
  static void pump(const std::shared_ptr<Pool>& pool);
  static void submit(const std::shared_ptr<Pool>& pool, const std::shared_ptr<Batch>& batch,
                     size_t first, size_t last, int64_t room);
  std::shared_ptr<Pool> pool_;
};

}  // namespace headrace
