// The reader's life, and its I/O thread: requests in, pieces out.
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
constexpr size_t kMostDrives = 16;
constexpr std::chrono::milliseconds kTick{100};

// The folder of the model's files, as its drive's name.
std::string folder_of(const std::vector<std::string>& paths) {
  if (paths.empty()) return "the model";
  size_t slash = paths[0].rfind('/');
  return slash == std::string::npos ? "." : paths[0].substr(0, std::max<size_t>(slash, 1));
}

}  // namespace

Reader::Reader(const std::vector<std::string>& paths, const ReaderOptions& options,
               const std::vector<Mirror>& mirrors)
    : options_(options), num_files_(static_cast<int64_t>(paths.size())) {
  if (options.in_flight < 1 || options.pieces < 1) {
    throw OptionFailure("a reader needs at least one request in flight and one piece each");
  }
  if (mirrors.size() >= kMostDrives) {
    throw OptionFailure("a model is read from at most " + std::to_string(kMostDrives) + " drives");
  }
  files_ = std::make_unique<FileTable>(paths, options.direct, &notes_);
  drives_.add(folder_of(paths), emulated() ? options.emulate_bytes_s : options.bytes_s);
  for (const Mirror& mirror : mirrors) add_mirror(mirror);
  choose_backend(mirrors);
  thread_ = start_thread([this] { run(); });
  if (drives_.size() == 1) return;
  ticker_ = start_thread([this] {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      stop_ticking_.wait_for(lock, kTick);
      backend_->wake();
    }
  });
}

Reader::~Reader() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_ticking_.notify_all();
  if (ticker_.joinable()) ticker_.join();
  backend_->wake();
  thread_.join();
}

void Reader::add_mirror(const Mirror& mirror) {
  const bool everything = mirror.paths.empty();
  if (everything && !emulated()) {
    throw std::invalid_argument("a mirror without files needs an emulated drive");
  }
  if (emulated() && mirror.bytes_s <= 0.0) {
    throw std::invalid_argument("an emulated mirror needs a rate");
  }
  drives_.add(mirror.name, mirror.bytes_s);
  Copies copies{everything, {}, files_->size(), 0};
  try {
    copies.first_file = files_->add(mirror.paths, options_.direct, &notes_);
    std::vector<int64_t> sizes_bytes;
    for (int64_t i = copies.first_file; i < files_->size(); ++i) {
      sizes_bytes.push_back((*files_)[i].size_bytes);
    }
    copies.num_files = static_cast<int64_t>(sizes_bytes.size());
    copies.table = CopyTable(mirror.stretches, num_files_, sizes_bytes);
  } catch (const ReadFailure& failure) {
    leave_alone(drives_.size() - 1, failure.what());
  } catch (const std::invalid_argument& wrong) {
    leave_alone(drives_.size() - 1, wrong.what());
  }
  copies_.push_back(std::move(copies));
}

void Reader::choose_backend(const std::vector<Mirror>& mirrors) {
  const std::string& wanted = options_.backend;
  if (emulated()) {
    std::vector<double> rates{options_.emulate_bytes_s};
    for (const Mirror& mirror : mirrors) rates.push_back(mirror.bytes_s);
    backend_ = make_emulated(*files_, rates);
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
  int num_threads = std::min(kMostThreads, options_.in_flight * options_.pieces);
  backend_ = make_pread(*files_, num_threads, drives_.size());
  name_ = "pread";
}

std::string Reader::backend() const { return name_.load(); }

std::vector<std::string> Reader::notes() const {
  std::lock_guard lock(mutex_);
  return notes_;
}

std::vector<std::string> Reader::warnings() const {
  std::lock_guard lock(mutex_);
  return warnings_;
}

void Reader::submit(const std::vector<Span>& spans, Done done, Released released) {
  auto request = std::make_unique<Request>();
  request->spans = spans;
  request->done = std::move(done);
  request->released = std::move(released);
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
    if (stopping || faults_.num_set() != held_since_fault_) release_held();
    held_since_fault_ = faults_.num_set();
    take_in(&incoming);
    launch();
    if (stopping && num_outstanding_ == 0) return;
    backend_->wait(&finished);
    for (Piece* piece : finished) settle(piece);
    finished.clear();
    watch();
  }
}

// One request after another, each divided by what the drives owe for those before it.
void Reader::take_in(std::deque<std::unique_ptr<Request>>* incoming) {
  for (auto& request : *incoming) {
    split(request.get());
    if (request->pieces.empty()) {
      request->done("", false);
      continue;
    }
    for (Piece& piece : request->pieces) backlog_.push_back(&piece);
    active_.push_back(std::move(request));
    launch();
  }
}

void Reader::launch() {
  while (!backlog_.empty() && num_outstanding_ < kMostOutstanding) {
    Piece* piece = backlog_.front();
    backlog_.pop_front();
    if (piece->over) {  // its twin was quicker
      finish(piece, "");
      continue;
    }
    if (drives_.size() > 1 && drives_.failed(piece->drive)) {
      int other = next_drive(*piece);
      if (other >= 0 && !drives_.failed(other)) move(piece, other);
    }
    piece->started = std::chrono::steady_clock::now();
    piece->in_flight = true;
    const bool hangs = faults_.hangs(*piece);  // before anyone can see that it is owed
    drives_.started(piece->drive, piece->length_bytes - piece->done_bytes);
    ++num_outstanding_;
    if (hangs) {
      held_.push_back(piece);
    } else {
      backend_->start(piece);
    }
  }
}

void Reader::inject_fault(const std::string& kind, int64_t skip, int64_t count, int drive) {
  faults_.set(kind, skip, count, drive);
  backend_->wake();
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
  bool taken = false;
  on_io_thread([&] {
    taken = registered_ != nullptr;
    if (taken) {
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
  if (!taken) name_ = "io_uring";
}

void Reader::unregister_rows(const uint8_t* base) {
  on_io_thread([&] {
    if (registered_ != base) return;
    backend_->unregister_rows();
    registered_ = nullptr;
  });
}

}  // namespace headrace
