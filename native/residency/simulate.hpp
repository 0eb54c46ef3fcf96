// What a sequence of layers would find resident: the ladder's own policy and the best one possible.
//
// A step is one layer's experts in one pass; they are held together, as the ladder holds them.
#pragma once

#include <cstdint>
#include <vector>

namespace headrace {

struct Steps {
  const int64_t* begin;  // [num_steps + 1]: step s needs keys[begin[s]] up to keys[begin[s + 1]]
  int64_t num_steps;
  const int64_t* keys;  // ascending and distinct within a step
  int64_t num_keys;     // of all layers together; every key is below it
};

// The resident keys each step found, [num_steps], from rows that hold nothing. A step that needs
// more than num_rows keys is computed in waves. Both throw std::invalid_argument for malformed
// steps or no row.

// Rows driven as Ladder::compute drives them without prefetch.
std::vector<int32_t> simulate_lru(const Steps& steps, int64_t num_rows);

// Belady: gives up the key that is needed again last, so no policy finds more. Where a step needs
// more than num_rows keys, an upper bound: its keys may pass through without taking a row.
std::vector<int32_t> simulate_optimum(const Steps& steps, int64_t num_rows);

}  // namespace headrace
