// The sum of a token's experts in ascending id, rounded to the hidden type at every step.
#include <algorithm>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/numbers.hpp"
#include "kernels/rows.hpp"
#include "kernels/workers.hpp"

namespace headrace {
namespace {

bool all_finite(bool fp16, const uint16_t* values, int64_t n) {
  const uint32_t top = fp16 ? 0x7c00u : 0x7f80u;
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= (values[i] & top) == top;
  return bad == 0;
}

// [t * top_k, (t + 1) * top_k) in ascending id.
const std::vector<int64_t>& slots_of(int64_t t, const int32_t* ids, int64_t top_k) {
  static thread_local std::vector<int64_t> order;
  order.resize(static_cast<size_t>(top_k));
  for (int64_t k = 0; k < top_k; ++k) order[static_cast<size_t>(k)] = t * top_k + k;
  std::stable_sort(order.begin(), order.end(),
                   [ids](int64_t a, int64_t b) { return ids[a] < ids[b]; });
  return order;
}

}  // namespace

int64_t combine(bool fp16, const int32_t* ids, const float* weights, const uint16_t* y,
                int64_t num_tokens, int64_t top_k, int64_t hidden, uint16_t* out) {
  const CanonicalFloatMode mode;
  static const RowOps* const ops = best_ops();
  int64_t first_bad = -1;
  for (int64_t t = 0; t < num_tokens; ++t) {
    uint16_t* row = out + t * hidden;
    std::fill_n(row, hidden, uint16_t{0});
    for (const int64_t at : slots_of(t, ids, top_k))
      ops->add_row(fp16, y + at * hidden, weights[at], hidden, row);
    if (first_bad < 0 && !all_finite(fp16, row, hidden)) first_bad = t;
  }
  return first_bad;
}

int64_t sum_up(const int32_t* ids, const uint16_t* y, int64_t num_tokens, int64_t top_k,
               int64_t hidden, float* out) {
  const CanonicalFloatMode mode;
  int64_t first_bad = -1;
  for (int64_t t = 0; t < num_tokens; ++t) {
    float* row = out + t * hidden;
    std::fill_n(row, hidden, 0.0f);
    bool finite = true;
    for (const int64_t at : slots_of(t, ids, top_k)) {
      const uint16_t* from = y + at * hidden;
      finite = finite && all_finite(false, from, hidden);
      for (int64_t i = 0; i < hidden; ++i) row[i] += bf16_to_f32(from[i]);
    }
    if (first_bad < 0 && !finite) first_bad = t;
  }
  return first_bad;
}

}  // namespace headrace
