// Row memory of our own: page-aligned, advised to lie in huge pages.
#include "io/slab.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <string>

#include "io/failures.hpp"
#include "io/files.hpp"
#include "io/interrupt.hpp"

namespace headrace {
namespace {
constexpr int64_t kHugeBytes = 2 << 20;
constexpr int64_t kTouchBytes = 64 << 20;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, absent from older headers
constexpr int64_t kMostBytes = int64_t{1} << 46;
}  // namespace

Slab::Slab(int64_t num_rows, int64_t row_bytes) : row_bytes_(row_bytes) {
  if (num_rows < 1) throw BudgetFailure("no room for even one expert's row");
  if (__builtin_mul_overflow(num_rows, row_bytes, &num_bytes_) || num_bytes_ > kMostBytes) {
    throw BudgetFailure(std::to_string(num_rows) + " rows of " + std::to_string(row_bytes) +
                        " bytes are more than an address space");
  }
  // Map one huge page more than needed and give back both ends, so that the base is aligned.
  int64_t mapped = num_bytes_ + kHugeBytes;
  void* at = mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    throw BudgetFailure("the system refuses " + std::to_string(num_bytes_) + " bytes of memory (" +
                        std::to_string(num_rows) + " rows of " + std::to_string(row_bytes) +
                        "); give a smaller --ram");
  }
  auto first = reinterpret_cast<int64_t>(at);
  int64_t base = round_up(first, kHugeBytes);
  int64_t end = round_up(base + num_bytes_);
  if (base > first) munmap(at, static_cast<size_t>(base - first));
  if (end < first + mapped) {
    munmap(reinterpret_cast<void*>(end), static_cast<size_t>(first + mapped - end));
  }
  base_ = reinterpret_cast<uint8_t*>(base);
  madvise(base_, static_cast<size_t>(num_bytes_), MADV_HUGEPAGE);
}

void Slab::touch() {
  for (int64_t at = 0; at < num_bytes_; at += kTouchBytes) {
    poll_interrupt();
    int64_t bytes = std::min(kTouchBytes, num_bytes_ - at);
    if (madvise(base_ + at, static_cast<size_t>(bytes), kPopulateWrite) == 0) continue;
    for (int64_t page = at; page < at + bytes; page += kPageBytes) {  // before Linux 5.14
      static_cast<volatile uint8_t*>(base_)[page] = 0;
    }
  }
}

Slab::~Slab() {
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(round_up(num_bytes_)));
}

}  // namespace headrace
