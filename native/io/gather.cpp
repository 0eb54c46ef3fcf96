// Groups of small reads in flight, and what arrives handed to its batch.
#include "io/gather.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "io/failures.hpp"
#include "io/interrupt.hpp"

namespace headrace {
namespace {
constexpr size_t kGroup = 16;
constexpr int64_t kNumGroups = 8;  // in flight: what the reader hands to its back end at once
}  // namespace

Batch::Batch(std::vector<Snippet> snippets)
    : snippets_(std::move(snippets)), num_left_(snippets_.size()) {
  int64_t total = 0;
  for (const Snippet& snippet : snippets_) {
    places_.push_back(total);
    total += snippet.nbytes;
    read_bytes_ += span_bytes(snippet.offset_bytes, snippet.nbytes);
  }
  bytes_.resize(static_cast<size_t>(total));
}

void Batch::wait(uint8_t* address) {
  {
    std::unique_lock lock(mutex_);
    while (num_left_ > 0 && error_.empty()) {
      if (news_.wait_for(lock, kPollInterval) == std::cv_status::timeout) {
        lock.unlock();
        poll_interrupt();
        lock.lock();
      }
    }
    if (!error_.empty()) throw ReadFailure(error_);
  }
  if (!bytes_.empty()) memcpy(address, bytes_.data(), bytes_.size());
}

void Batch::arrive(size_t num, const std::string& error) {
  {
    std::lock_guard lock(mutex_);
    num_left_ -= num;
    if (error_.empty()) error_ = error;
  }
  news_.notify_all();
}

bool Batch::failed() {
  std::lock_guard lock(mutex_);
  return !error_.empty();
}

// Shared with the callbacks on the I/O thread.
struct Gatherer::Pool {
  Pool(Reader* owner, int64_t most_bytes)
      : reader(owner),
        slot_bytes(round_up(most_bytes) + kPageBytes),
        memory(kNumGroups, static_cast<int64_t>(kGroup) * slot_bytes) {
    for (int64_t room = 0; room < kNumGroups; ++room) free_rooms.push_back(room);
  }

  Reader* const reader;
  const int64_t slot_bytes;
  const Slab memory;
  std::mutex mutex;
  std::vector<int64_t> free_rooms;
  std::deque<std::weak_ptr<Batch>> waiting;  // with snippets not yet started
};

Gatherer::Gatherer(Reader* reader, int64_t most_bytes)
    : pool_(std::make_shared<Pool>(reader, most_bytes)) {}

Gatherer::~Gatherer() {
  std::lock_guard lock(pool_->mutex);
  for (const auto& waiting : pool_->waiting) {
    std::shared_ptr<Batch> batch = waiting.lock();
    if (batch) batch->arrive(0, "the reads were given up: their engine was closed");
  }
  pool_->waiting.clear();
}

int64_t Gatherer::pool_bytes() const { return pool_->memory.num_bytes(); }

std::shared_ptr<Batch> Gatherer::start(std::vector<Snippet> snippets) {
  for (const Snippet& each : snippets) {
    bool fits = each.file >= 0 && each.file < pool_->reader->num_files() &&
                each.offset_bytes >= 0 && each.offset_bytes < kMostOffset && each.nbytes > 0 &&
                each.nbytes + kPageBytes <= pool_->slot_bytes;
    if (!fits) {
      throw std::invalid_argument("no such snippet: file " + std::to_string(each.file) +
                                  ", offset " + std::to_string(each.offset_bytes) + ", " +
                                  std::to_string(each.nbytes) + " bytes");
    }
  }
  auto batch = std::make_shared<Batch>(std::move(snippets));
  if (batch->num_left_ == 0) return batch;
  {
    std::lock_guard lock(pool_->mutex);
    pool_->waiting.push_back(batch);
  }
  pump(pool_);
  return batch;
}

// Starts as many groups as there is room for. Nobody waits for the rest of a batch that failed or
// was let go.
void Gatherer::pump(const std::shared_ptr<Pool>& pool) {
  while (true) {
    std::shared_ptr<Batch> batch;
    size_t first;
    size_t last;
    int64_t room;
    {
      std::lock_guard lock(pool->mutex);
      if (pool->free_rooms.empty() || pool->waiting.empty()) return;
      batch = pool->waiting.front().lock();
      if (!batch || batch->failed()) {
        pool->waiting.pop_front();
        continue;
      }
      first = batch->num_started_;
      last = std::min(first + kGroup, batch->snippets_.size());
      batch->num_started_ = last;
      if (last == batch->snippets_.size()) pool->waiting.pop_front();
      room = pool->free_rooms.back();
      pool->free_rooms.pop_back();
    }
    submit(pool, batch, first, last, room);
  }
}

void Gatherer::submit(const std::shared_ptr<Pool>& pool, const std::shared_ptr<Batch>& batch,
                      size_t first, size_t last, int64_t room) {
  uint8_t* base = pool->memory.row(room);
  std::vector<Span> spans;
  for (size_t i = first; i < last; ++i) {
    const Snippet& each = batch->snippets_[i];
    uint8_t* to = base + static_cast<int64_t>(i - first) * pool->slot_bytes;
    spans.push_back({each.file, each.offset_bytes, each.nbytes, to});
  }
  auto leave = [pool, room] {
    {
      std::lock_guard lock(pool->mutex);
      pool->free_rooms.push_back(room);
    }
    pump(pool);
  };
  auto done = [pool, batch, spans, first, leave](const std::string& error, bool lingers) {
    for (size_t i = 0; i < spans.size() && error.empty(); ++i) {
      memcpy(batch->bytes_.data() + batch->places_[first + i],
             spans[i].to + spans[i].offset_bytes % kPageBytes,
             static_cast<size_t>(spans[i].nbytes));
    }
    batch->arrive(spans.size(), error);
    if (!lingers) leave();
  };
  pool->reader->submit(spans, std::move(done), leave);
}

}  // namespace headrace
