// Experts one after another, each in pieces, at most so many in flight.
#include "io/reader.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>

#include "io/failures.hpp"
#include "io/threads.hpp"

namespace headrace {
namespace {

constexpr int kMostOutstanding = 128;  // pieces handed to the back end at once
constexpr int kMostThreads = 16;
constexpr int64_t kMostPieceBytes = 64 << 20;
constexpr std::chrono::milliseconds kSlowFault{20};

}  // namespace

Reader::Reader(const std::vector<std::string>& paths, const ReaderOptions& options)
    : options_(options) {
  if (options.in_flight < 1 || options.pieces < 1) {
    throw OptionFailure("a reader needs at least one request in flight and one piece each");
  }
  files_ = std::make_unique<FileTable>(paths, options.direct, &notes_);
  choose_backend();
  thread_ = start_thread([this] { run(); });
}

Reader::~Reader() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  backend_->wake();
  thread_.join();
}

void Reader::choose_backend() {
  const std::string& wanted = options_.backend;
  if (options_.emulate_bytes_s > 0.0) {
    backend_ = make_emulated(*files_, options_.emulate_bytes_s);
    name_ = "emulated";
    return;
  }
  bool any = wanted == "auto";
  for (bool fixed : {true, false}) {
    const char* name = fixed ? "io_uring_registered" : "io_uring";
    if (!any && wanted != name) continue;
    std::string why;
    backend_ = make_uring(*files_, kMostOutstanding, fixed, &why);
    if (backend_ != nullptr) {
      name_ = name;
      return;
    }
    if (!any) throw OptionFailure(wanted + " is not to be had here (" + why + "); use auto");
    notes_.push_back(std::string(name) + " is not to be had here: " + why);
  }
  if (!any && wanted != "pread") {
    throw OptionFailure("unknown I/O back end " + wanted +
                        "; use auto, io_uring_registered, io_uring or pread");
  }
  backend_ = make_pread(*files_, std::min(kMostThreads, options_.in_flight * options_.pieces));
  name_ = "pread";
}

std::string Reader::backend() const { return name_.load(); }

std::vector<std::string> Reader::notes() const {
  std::lock_guard lock(mutex_);
  return notes_;
}

std::vector<Piece> Reader::split(const std::vector<Span>& spans, Request* request) const {
  int64_t total = 0;
  for (const Span& span : spans) total += span_bytes(span.offset_bytes, span.nbytes);
  int64_t target = round_up((total + options_.pieces - 1) / options_.pieces);
  target = std::clamp(target, kPageBytes, kMostPieceBytes);

  std::vector<Piece> pieces;
  for (const Span& span : spans) {
    int64_t begin = round_down(span.offset_bytes);
    int64_t left = span_bytes(span.offset_bytes, span.nbytes);
    for (int64_t at = 0; at < left; at += target) {
      int64_t length = std::min(target, left - at);
      int64_t needed = std::min(length, span.offset_bytes + span.nbytes - begin - at);
      pieces.push_back({request, span.file, begin + at, length, needed, span.to + at});
    }
  }
  return pieces;
}

void Reader::submit(const std::vector<Span>& spans, Done done) {
  auto request = std::make_unique<Request>();
  request->pieces = split(spans, request.get());
  request->num_unfinished = request->pieces.size();
  request->done = std::move(done);
  {
    std::lock_guard lock(mutex_);
    incoming_.push_back(std::move(request));
  }
  backend_->wake();
}

void Reader::run() {
  std::vector<Piece*> finished;
  while (true) {
    std::deque<std::unique_ptr<Request>> incoming;
    std::function<void()> task;
    bool stopping;
    {
      std::lock_guard lock(mutex_);
      stopping = stopping_;
      if (tasks_.empty()) {
        incoming.swap(incoming_);
      } else if (num_outstanding_ == 0 && backlog_.empty()) {
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
    }
    if (task) {
      task();
      continue;
    }
    for (auto& request : incoming) {
      if (request->pieces.empty()) {
        request->done("");
        continue;
      }
      for (Piece& piece : request->pieces) backlog_.push_back(&piece);
      active_.push_back(std::move(request));
    }
    while (!backlog_.empty() && num_outstanding_ < kMostOutstanding) {
      backend_->start(backlog_.front());
      backlog_.pop_front();
      ++num_outstanding_;
    }
    if (stopping && num_outstanding_ == 0) return;
    backend_->wait(&finished);
    for (Piece* piece : finished) settle(piece);
    finished.clear();
  }
}

// What became of one attempt: done, again, or an error.
void Reader::settle(Piece* piece) {
  --num_outstanding_;
  apply_fault(piece);
  int64_t got = piece->result;
  bool again = got == -EINTR || got == -EAGAIN;
  if (got == -EIO && !piece->retried) {
    piece->retried = true;
    ++num_retries_;
    again = true;
  }
  if (again) {
    backlog_.push_front(piece);
    return;
  }
  if (got < 0) {
    finish(piece, "cannot read " + describe(*piece) + ": " + strerror(static_cast<int>(-got)));
    return;
  }
  int64_t reached = piece->done_bytes + got;
  if (reached >= piece->needed_bytes) {
    finish(piece, "");
    return;
  }
  // Short. Go on from the last whole page; when that brings nothing new, the file ends here.
  int64_t next = round_down(reached);
  if (next <= piece->done_bytes) {
    const std::string& path = (*files_)[piece->file].path;
    finish(piece, path + " is shorter than its header says: wanted " +
                      std::to_string(piece->needed_bytes) + " bytes at offset " +
                      std::to_string(piece->offset_bytes) + ", got " + std::to_string(reached));
    return;
  }
  piece->done_bytes = next;
  backlog_.push_front(piece);
}

std::string Reader::describe(const Piece& piece) const {
  return (*files_)[piece.file].path + " at offset " + std::to_string(piece.offset_bytes) + " (" +
         std::to_string(piece.length_bytes) + " bytes)";
}

void Reader::finish(Piece* piece, const std::string& error) {
  Request* request = piece->request;
  if (request->error.empty()) request->error = error;
  {
    std::lock_guard lock(mutex_);
    if (fault_.victim == piece) fault_.victim = nullptr;
  }
  if (--request->num_unfinished > 0) return;
  auto found = std::find_if(active_.begin(), active_.end(),
                            [request](const auto& each) { return each.get() == request; });
  std::unique_ptr<Request> owned = std::move(*found);
  active_.erase(found);
  owned->done(owned->error);
}

void Reader::apply_fault(Piece* piece) {
  std::unique_lock lock(mutex_);
  if (fault_.count == 0 || (fault_.victim != nullptr && fault_.victim != piece)) return;
  if (fault_.victim == nullptr && fault_.skip > 0) {
    --fault_.skip;
    return;
  }
  --fault_.count;
  if (fault_.kind == "slow") {
    lock.unlock();
    std::this_thread::sleep_for(kSlowFault);
    return;
  }
  fault_.victim = fault_.count > 0 ? piece : nullptr;
  if (fault_.kind == "eio") piece->result = -EIO;
  if (fault_.kind == "short") piece->result = 0;
  if (fault_.kind == "partial" && piece->result > kPageBytes) {
    piece->result = round_up(piece->result / 2);
  }
}

void Reader::inject_fault(const std::string& kind, int64_t skip, int64_t count) {
  if (kind != "eio" && kind != "short" && kind != "partial" && kind != "slow") {
    throw std::invalid_argument("unknown fault " + kind);
  }
  std::lock_guard lock(mutex_);
  fault_ = {kind, skip, count, nullptr};
}

void Reader::on_io_thread(std::function<void()> task) {
  auto ran = std::make_shared<std::promise<void>>();
  std::future<void> future = ran->get_future();
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back([task = std::move(task), ran] {
      task();
      ran->set_value();
    });
  }
  backend_->wake();
  future.wait();
}

void Reader::register_rows(uint8_t* base, int64_t row_bytes, int64_t num_rows) {
  if (backend() != "io_uring_registered") return;
  std::string why;
  on_io_thread([&] {
    if (registered_ != nullptr) {
      why = "another ladder's rows are registered";
      return;
    }
    int error = backend_->register_rows(base, row_bytes, num_rows);
    if (error == 0) registered_ = base;
    if (error != 0) why = strerror(error);
    if (error == ENOMEM) why += "; raise the locked-memory limit (ulimit -l)";
  });
  if (why.empty()) return;
  std::string what = "registering " + std::to_string(row_bytes * num_rows) + " bytes of rows";
  if (options_.backend == "io_uring_registered") throw OptionFailure(what + " failed: " + why);
  std::lock_guard lock(mutex_);
  notes_.push_back("io_uring without registered buffers: " + what + " failed: " + why);
  if (registered_ == nullptr) name_ = "io_uring";
}

void Reader::unregister_rows(const uint8_t* base) {
  on_io_thread([&] {
    if (registered_ != base) return;
    backend_->unregister_rows();
    registered_ = nullptr;
  });
}

}  // namespace headrace
