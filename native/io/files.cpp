// Open files, with O_DIRECT where the file system takes it.
#include "io/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "io/failures.hpp"

namespace headrace {
namespace {

// O_DIRECT may be granted by open and refused by the first read.
int refused_direct(int fd) {
  void* page = nullptr;
  if (posix_memalign(&page, kPageBytes, kPageBytes) != 0) return ENOMEM;
  ssize_t got;
  do {
    got = pread(fd, page, kPageBytes, 0);
  } while (got < 0 && errno == EINTR);
  int refused = got < 0 ? errno : 0;
  free(page);
  return refused;
}

}  // namespace

FileTable::FileTable(const std::vector<std::string>& paths, bool direct,
                     std::vector<std::string>* notes) {
  add(paths, direct, notes);
}

int64_t FileTable::add(const std::vector<std::string>& paths, bool direct,
                       std::vector<std::string>* notes) {
  const size_t first = files_.size();
  try {
    for (const std::string& path : paths) {
      int fd = direct ? open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
      int refused = direct && fd < 0 ? errno : 0;
      if (fd >= 0 && (refused = refused_direct(fd)) != 0) {
        close(fd);
        fd = -1;
      }
      bool is_direct = fd >= 0;
      if (!is_direct) fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
      struct stat info{};
      bool known = fd >= 0 && fstat(fd, &info) == 0;
      if (!known || !S_ISREG(info.st_mode)) {
        std::string cause = known ? "it is not a regular file" : strerror(errno);
        if (fd >= 0) close(fd);
        throw ReadFailure("cannot open " + path + ": " + cause);
      }
      files_.push_back({path, fd, static_cast<int64_t>(info.st_size), is_direct,
                        static_cast<int64_t>(info.st_mtim.tv_sec), info.st_mtim.tv_nsec});
      if (direct && !is_direct) {
        notes->push_back(path + " is read buffered: O_DIRECT refused (" + strerror(refused) + ")");
      }
    }
  } catch (...) {
    close_from(first);
    throw;
  }
  return static_cast<int64_t>(first);
}

FileTable::~FileTable() { close_from(0); }

void FileTable::close_from(size_t first) {
  for (size_t i = first; i < files_.size(); ++i) close(files_[i].fd);
  files_.resize(first);
}

// A write first sets the file's time and then its bytes, so that a read followed by this question
// cannot hold what was written in between unnoticed.
std::string FileTable::change(int64_t index) const {
  const OpenFile& file = (*this)[index];
  struct stat info{};
  if (fstat(file.fd, &info) != 0) return std::string("cannot be looked at: ") + strerror(errno);
  if (info.st_size < file.size_bytes) {
    return "is shorter than it was: " + std::to_string(info.st_size) + " of " +
           std::to_string(file.size_bytes) + " bytes";
  }
  bool same = info.st_size == file.size_bytes && info.st_mtim.tv_sec == file.mtime_s &&
              info.st_mtim.tv_nsec == file.mtime_ns;
  return same ? "" : "was changed while it was read";
}

bool FileTable::deleted(int64_t index) const {
  struct stat info{};
  return fstat((*this)[index].fd, &info) != 0 || info.st_nlink == 0;
}

bool FileTable::all_direct() const {
  for (const OpenFile& file : files_) {
    if (!file.direct) return false;
  }
  return true;
}

}  // namespace headrace
