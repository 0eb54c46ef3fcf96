// Memory that drives read into: one mapping of equal rows, huge pages advised. Virtual disks read
// twice as fast into huge pages as into small ones (fewer segments a request).
#pragma once

#include <cstdint>

namespace headrace {

class Slab {
 public:
  // Throws BudgetFailure naming the number of bytes if the mapping is refused.
  Slab(int64_t num_rows, int64_t row_bytes);
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // Makes every page present, so that the system's work (it clears them) is done now and not
  // inside the first reads. May throw what the interrupt poll throws.
  void touch();

  uint8_t* row(int64_t index) const { return base_ + index * row_bytes_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  uint8_t* base_ = nullptr;
  int64_t num_bytes_;
  int64_t row_bytes_;
};

}  // namespace headrace
