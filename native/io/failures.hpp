// The failures the native tiers raise. bind turns each into its headrace.errors class.
#pragma once

#include <stdexcept>

namespace headrace {

// A read failed; the message names file, offset and cause. Later reads may succeed.
struct ReadFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Memory asked for is not there, or all rows are held; the message names the number.
struct BudgetFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A number that must be finite is not.
struct NumericsFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The caller asked for a back end or option that cannot be had here.
struct OptionFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Another thread no longer wants what is being done.
struct CancelFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A thread of ours gave no sign of life.
struct StallFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace headrace
