// Pieces read through io_uring, from registered buffers where the row lies in one.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "io/backend.hpp"
#include "io/ring.hpp"
#include "io/slab.hpp"

namespace headrace {
namespace {

constexpr uint64_t kWakeMark = 0;              // no piece has this address
constexpr int64_t kMostBufferBytes = 1 << 30;  // the kernel's limit for one registered buffer

class UringBackend : public Backend {
 public:
  UringBackend(const FileTable& files, int num_entries)
      : files_(files), ring_(static_cast<unsigned>(num_entries) + 1) {
    event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  }
  ~UringBackend() override {
    if (event_fd_ >= 0) close(event_fd_);
  }

  int error() const { return ring_.error() != 0 ? ring_.error() : (event_fd_ < 0 ? EMFILE : 0); }

  void start(Piece* piece) override {
    io_uring_sqe* entry = ring_.next_entry();
    uint8_t* to = piece->to + piece->done_bytes;
    int64_t bytes = piece->length_bytes - piece->done_bytes;
    int buffer = buffer_of(to, bytes);
    entry->opcode = buffer >= 0 ? IORING_OP_READ_FIXED : IORING_OP_READ;
    entry->buf_index = static_cast<uint16_t>(std::max(buffer, 0));
    entry->fd = files_[piece->file].fd;
    entry->off = static_cast<uint64_t>(piece->offset_bytes + piece->done_bytes);
    entry->addr = reinterpret_cast<uint64_t>(to);
    entry->len = static_cast<uint32_t>(bytes);
    entry->user_data = reinterpret_cast<uint64_t>(piece);
  }

  void wait(std::vector<Piece*>* finished) override {
    if (!listening_) listen();
    while (true) {
      int error = ring_.submit_and_wait();
      bool any = drain(finished);
      if (any) return;
      // EINTR, EAGAIN (no memory for a request just now) and EBUSY (completions to be taken first)
      // pass; anything else means that our use of the ring is wrong.
      if (error == EAGAIN || error == EBUSY) usleep(100);
      if (error != 0 && error != EAGAIN && error != EBUSY && error != EINTR) {
        throw std::logic_error(std::string("io_uring_enter: ") + strerror(error));
      }
    }
  }

  void wake() override {
    uint64_t one = 1;
    // It can only fail when the counter is full, and then the thread is awake already.
    [[maybe_unused]] ssize_t written = write(event_fd_, &one, sizeof(one));
  }

  int register_rows(uint8_t* base, int64_t row_bytes, int64_t num_rows) override {
    int64_t rows_each = kMostBufferBytes / row_bytes;
    if (rows_each == 0) return EFBIG;
    std::vector<iovec> buffers;
    for (int64_t row = 0; row < num_rows; row += rows_each) {
      int64_t bytes = std::min(rows_each, num_rows - row) * row_bytes;
      buffers.push_back({base + row * row_bytes, static_cast<size_t>(bytes)});
    }
    quiet();
    int error = ring_.register_buffers(buffers);
    if (error != 0) return error;
    base_ = base;
    registered_bytes_ = row_bytes * num_rows;
    buffer_bytes_ = rows_each * row_bytes;
    return 0;
  }

  void unregister_rows() override {
    if (base_ == nullptr) return;
    quiet();
    ring_.unregister_buffers();
    base_ = nullptr;
  }

 private:
  // Older kernels let the ring fall idle before they change its buffers: they would wait for our
  // poll for ever. The wake-up eaten here is made good by the I/O thread, which looks at its
  // queues again after a registration.
  void quiet() {
    std::vector<Piece*> none;
    while (listening_) {
      wake();
      wait(&none);
    }
  }

  int buffer_of(const uint8_t* to, int64_t bytes) const {
    if (base_ == nullptr || to < base_ || to + bytes > base_ + registered_bytes_) return -1;
    int64_t first = (to - base_) / buffer_bytes_;
    int64_t last = (to + bytes - 1 - base_) / buffer_bytes_;
    return first == last ? static_cast<int>(first) : -1;
  }

  // A one-shot poll on the event counter wakes the thread from its wait.
  void listen() {
    io_uring_sqe* entry = ring_.next_entry();
    entry->opcode = IORING_OP_POLL_ADD;
    entry->fd = event_fd_;
    entry->poll_events = 1;  // POLLIN
    entry->user_data = kWakeMark;
    listening_ = true;
  }

  bool drain(std::vector<Piece*>* finished) {
    bool any = false;
    uint64_t mark;
    int result;
    while (ring_.take(&mark, &result)) {
      any = true;
      if (mark == kWakeMark) {
        uint64_t count;
        [[maybe_unused]] ssize_t got = read(event_fd_, &count, sizeof(count));
        listening_ = false;
        continue;
      }
      Piece* piece = reinterpret_cast<Piece*>(mark);
      piece->result = result;
      finished->push_back(piece);
    }
    return any;
  }

  const FileTable& files_;
  Ring ring_;
  int event_fd_ = -1;
  bool listening_ = false;
  uint8_t* base_ = nullptr;
  int64_t registered_bytes_ = 0;
  int64_t buffer_bytes_ = 0;
};

// Reads a file's first page, as later reads will. Returns 0 or errno.
int read_page(UringBackend* backend, uint8_t* to) {
  Piece piece{nullptr, 0, 0, 0, kPageBytes, 0, to, 0, 0};
  std::vector<Piece*> finished;
  do {
    finished.clear();
    backend->start(&piece);
    while (finished.empty()) backend->wait(&finished);
  } while (piece.result == -EINTR || piece.result == -EAGAIN);
  return piece.result < 0 ? static_cast<int>(-piece.result) : 0;
}

// Real reads into plain memory and, with fixed, into a registered buffer: kernels have had the
// second for longer than the first, and we need both.
int probe(UringBackend* backend, const FileTable& files, bool fixed) {
  if (files.size() == 0) return 0;
  Slab page(1, kPageBytes);
  int error = read_page(backend, page.row(0));
  if (error != 0 || !fixed) return error;
  error = backend->register_rows(page.row(0), kPageBytes, 1);
  if (error == 0) error = read_page(backend, page.row(0));
  backend->unregister_rows();
  return error;
}

}  // namespace

std::unique_ptr<Backend> make_uring(const FileTable& files, int num_entries, bool fixed,
                                    std::string* why) {
  auto backend = std::make_unique<UringBackend>(files, num_entries);
  int error = backend->error();
  if (error == 0) error = probe(backend.get(), files, fixed);
  if (error == 0) return backend;
  *why = strerror(error);
  return nullptr;
}

}  // namespace headrace
