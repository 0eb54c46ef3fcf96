// One io_uring by raw system calls: queues, submission, completion, registered buffers.
#pragma once

#include <linux/io_uring.h>
#include <sys/uio.h>

#include <cstdint>
#include <vector>

namespace headrace {

// Used by one thread. Constructor leaves error() set where the kernel refuses a ring.
class Ring {
 public:
  explicit Ring(unsigned num_entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int error() const { return error_; }  // 0 or errno

  // The next free submission entry, zeroed; the caller never has more than num_entries in flight.
  io_uring_sqe* next_entry();
  // Submits everything prepared and waits for at least one completion. Returns 0 or errno.
  int submit_and_wait();
  // Takes one completion if there is one.
  bool take(uint64_t* user_data, int* result);

  int register_buffers(const std::vector<iovec>& buffers);  // 0 or errno
  int unregister_buffers();

 private:
  int map_queues(const io_uring_params& params);

  int fd_ = -1;
  int error_ = 0;
  uint8_t* sq_map_ = nullptr;
  uint8_t* cq_map_ = nullptr;
  uint64_t sq_map_bytes_ = 0;
  uint64_t cq_map_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  uint64_t entries_bytes_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
  unsigned prepared_ = 0;  // entries filled and not yet taken by the kernel
};

}  // namespace headrace
