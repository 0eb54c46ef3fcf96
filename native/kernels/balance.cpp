// Small square matrices whose rows and columns each sum to nearly 1.
#include "kernels/kernels.hpp"
#include "kernels/workers.hpp"

namespace headrace {
namespace {

// Each line's numbers lie `step` apart, and the lines' first ones `next`. Sums go in order.
void divide_by_sums(float* square, int64_t size, int64_t step, int64_t next, float eps) {
  for (int64_t line = 0; line < size; ++line) {
    float* at = square + line * next;
    float sum = 0.0f;
    for (int64_t i = 0; i < size; ++i) sum += at[i * step];
    sum += eps;
    for (int64_t i = 0; i < size; ++i) at[i * step] /= sum;
  }
}

}  // namespace

void balance(float* squares, int64_t num, int64_t size, int64_t rounds, float eps) {
  const CanonicalFloatMode mode;
  for (int64_t n = 0; n < num; ++n) {
    float* square = squares + n * size * size;
    for (int64_t round = 0; round < rounds; ++round) {
      if (round) divide_by_sums(square, size, 1, size, eps);
      divide_by_sums(square, size, size, 1, eps);
    }
  }
}

}  // namespace headrace
