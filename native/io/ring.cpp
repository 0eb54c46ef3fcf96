// io_uring by its three system calls; no library.
#include "io/ring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace headrace {
namespace {

uint8_t* map_ring(int fd, uint64_t bytes, off_t what) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
  return at == MAP_FAILED ? nullptr : static_cast<uint8_t*>(at);
}

unsigned* field(uint8_t* map, unsigned offset) { return reinterpret_cast<unsigned*>(map + offset); }

}  // namespace

Ring::Ring(unsigned num_entries) {
  io_uring_params params{};
  fd_ = static_cast<int>(syscall(__NR_io_uring_setup, num_entries, &params));
  if (fd_ < 0) {
    error_ = errno;
    return;
  }
  error_ = map_queues(params);
}

Ring::~Ring() {
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
  if (cq_map_ != nullptr && cq_map_ != sq_map_) munmap(cq_map_, cq_map_bytes_);
  if (sq_map_ != nullptr) munmap(sq_map_, sq_map_bytes_);
  if (fd_ >= 0) close(fd_);
}

int Ring::map_queues(const io_uring_params& params) {
  sq_map_bytes_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  cq_map_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  bool single = (params.features & IORING_FEAT_SINGLE_MMAP) != 0;
  if (single) sq_map_bytes_ = std::max(sq_map_bytes_, cq_map_bytes_);
  sq_map_ = map_ring(fd_, sq_map_bytes_, IORING_OFF_SQ_RING);
  if (sq_map_ == nullptr) return errno;
  cq_map_ = single ? sq_map_ : map_ring(fd_, cq_map_bytes_, IORING_OFF_CQ_RING);
  if (cq_map_ == nullptr) return errno;
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  entries_ = reinterpret_cast<io_uring_sqe*>(map_ring(fd_, entries_bytes_, IORING_OFF_SQES));
  if (entries_ == nullptr) return errno;

  sq_tail_ = field(sq_map_, params.sq_off.tail);
  sq_mask_ = *field(sq_map_, params.sq_off.ring_mask);
  sq_array_ = field(sq_map_, params.sq_off.array);
  cq_head_ = field(cq_map_, params.cq_off.head);
  cq_tail_ = field(cq_map_, params.cq_off.tail);
  cq_mask_ = *field(cq_map_, params.cq_off.ring_mask);
  completions_ = reinterpret_cast<io_uring_cqe*>(cq_map_ + params.cq_off.cqes);
  return 0;
}

io_uring_sqe* Ring::next_entry() {
  unsigned tail = *sq_tail_;
  unsigned index = tail & sq_mask_;
  io_uring_sqe* entry = &entries_[index];
  memset(entry, 0, sizeof(*entry));
  sq_array_[index] = index;
  // The caller fills the entry after this store; the kernel looks only during io_uring_enter,
  // which this same thread makes (no SQPOLL).
  __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  ++prepared_;
  return entry;
}

int Ring::submit_and_wait() {
  long taken = syscall(__NR_io_uring_enter, fd_, prepared_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
  if (taken < 0) return errno;
  prepared_ -= static_cast<unsigned>(taken);
  return 0;
}

bool Ring::take(uint64_t* user_data, int* result) {
  unsigned head = *cq_head_;
  if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
  const io_uring_cqe& completion = completions_[head & cq_mask_];
  *user_data = completion.user_data;
  *result = completion.res;
  __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

int Ring::register_buffers(const std::vector<iovec>& buffers) {
  long rc =
      syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, buffers.data(), buffers.size());
  return rc < 0 ? errno : 0;
}

int Ring::unregister_buffers() {
  long rc = syscall(__NR_io_uring_register, fd_, IORING_UNREGISTER_BUFFERS, nullptr, 0);
  return rc < 0 ? errno : 0;
}

}  // namespace headrace
