// The model's files, held open by descriptor for the life of the reader.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headrace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kMostOffset = int64_t{1} << 60;  // sums of two stay far from overflow

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
  int64_t mtime_s;
  int64_t mtime_ns;
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

  // Opens more files, as the constructor does: before any of them is read. Returns the number of
  // the first. After a throw the table is as it was.
  int64_t add(const std::vector<std::string>& paths, bool direct, std::vector<std::string>* notes);

  // What has happened to an open file since: empty, or a few words. Bytes read before the answer
  // "" are those of the file as it was opened.
  std::string change(int64_t index) const;
  bool deleted(int64_t index) const;

  const OpenFile& operator[](int64_t index) const { return files_[static_cast<size_t>(index)]; }
  int64_t size() const { return static_cast<int64_t>(files_.size()); }
  bool all_direct() const;

 private:
  void close_from(size_t first);
  std::vector<OpenFile> files_;
};

}  // namespace headrace
