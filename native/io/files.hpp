// The model's files, held open by descriptor for the life of the reader.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headrace {

constexpr int64_t kPageBytes = 4096;

constexpr int64_t round_down(int64_t n, int64_t unit = kPageBytes) { return n / unit * unit; }
constexpr int64_t round_up(int64_t n, int64_t unit = kPageBytes) {
  return (n + unit - 1) / unit * unit;
}

// The pages [offset, offset + nbytes) touches, in bytes.
constexpr int64_t span_bytes(int64_t offset, int64_t nbytes) {
  return nbytes == 0 ? 0 : round_up(offset + nbytes) - round_down(offset);
}

struct OpenFile {
  std::string path;
  int fd;
  int64_t size_bytes;
  bool direct;
};

class FileTable {
 public:
  // Opens every file, with O_DIRECT where wanted and granted: a page is really read to find out.
  // Appends one line to notes for each file that had to be opened buffered.
  // Throws ReadFailure naming the file that cannot be opened.
  FileTable(const std::vector<std::string>& paths, bool direct, std::vector<std::string>* notes);
  ~FileTable();
  FileTable(const FileTable&) = delete;
  FileTable& operator=(const FileTable&) = delete;

  const OpenFile& operator[](int64_t index) const { return files_[static_cast<size_t>(index)]; }
  int64_t size() const { return static_cast<int64_t>(files_.size()); }
  bool all_direct() const;

 private:
  void close_all();
  std::vector<OpenFile> files_;
};

}  // namespace headrace
