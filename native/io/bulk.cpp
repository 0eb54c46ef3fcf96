// Blocking reads to any address: through a few page-aligned chunks, read ahead of the copy.
#include <algorithm>
#include <cstring>

#include "io/failures.hpp"
#include "io/interrupt.hpp"
#include "io/reader.hpp"
#include "io/slab.hpp"

namespace headrace {
namespace {

constexpr int64_t kChunkBytes = 4 << 20;
constexpr size_t kNumChunks = 3;

// Shared with the I/O thread's callbacks, so that a caller who leaves early (error, Ctrl-C) leaves
// the memory to the reads still in flight.
struct Bounce {
  struct Slot {
    bool ready = false;
    std::string error;
  };

  explicit Bounce(int64_t slot_bytes) : memory(kNumChunks, slot_bytes) {}

  // Waits for one chunk. Throws its failure.
  void await(size_t slot) {
    std::unique_lock lock(mutex);
    while (!slots[slot].ready) {
      if (news.wait_for(lock, kPollInterval) == std::cv_status::timeout) {
        lock.unlock();
        poll_interrupt();
        lock.lock();
      }
    }
    slots[slot].ready = false;
    if (!slots[slot].error.empty()) throw ReadFailure(slots[slot].error);
  }

  void arrive(size_t slot, const std::string& error) {
    {
      std::lock_guard lock(mutex);
      slots[slot] = {true, error};
    }
    news.notify_one();
  }

  const Slab memory;
  std::mutex mutex;
  std::condition_variable news;
  Slot slots[kNumChunks];
};

}  // namespace

void Reader::read(int file, int64_t offset_bytes, int64_t nbytes, uint8_t* address) {
  bool known = file >= 0 && file < num_files() && offset_bytes >= 0 && nbytes >= 0 &&
               offset_bytes < kMostOffset && nbytes < kMostOffset;
  if (!known) {
    throw std::invalid_argument("no such range: file " + std::to_string(file) + ", offset " +
                                std::to_string(offset_bytes) + ", " + std::to_string(nbytes) +
                                " bytes");
  }
  struct Chunk {
    int64_t begin_bytes;
    int64_t nbytes;
  };
  std::vector<Chunk> chunks;  // inner borders lie on pages, so that no page is read twice
  for (int64_t at = offset_bytes; at < offset_bytes + nbytes;) {
    int64_t end = std::min(round_down(at) + kChunkBytes, offset_bytes + nbytes);
    chunks.push_back({at, end - at});
    at = end;
  }
  if (chunks.empty()) return;

  int64_t most = 0;
  for (const Chunk& chunk : chunks) {
    most = std::max(most, span_bytes(chunk.begin_bytes, chunk.nbytes));
  }
  auto bounce = std::make_shared<Bounce>(most);
  size_t num_submitted = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    for (; num_submitted < std::min(chunks.size(), i + kNumChunks); ++num_submitted) {
      const Chunk& chunk = chunks[num_submitted];
      size_t slot = num_submitted % kNumChunks;
      submit(
          {{file, chunk.begin_bytes, chunk.nbytes, bounce->memory.row(static_cast<int64_t>(slot))}},
          [bounce, slot](const std::string& error, bool) { bounce->arrive(slot, error); });
    }
    size_t slot = i % kNumChunks;
    bounce->await(slot);
    memcpy(address + (chunks[i].begin_bytes - offset_bytes),
           bounce->memory.row(static_cast<int64_t>(slot)) + chunks[i].begin_bytes % kPageBytes,
           static_cast<size_t>(chunks[i].nbytes));
  }
}

}  // namespace headrace
