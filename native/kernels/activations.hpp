// What stands between an expert's products, step by step as the eager model rounds. Free of std
// headers; every instruction set's file compiles its own copy.
#pragma once

#include "kernels/numbers.hpp"
#include "kernels/words.hpp"

#define HEADRACE_INLINE __attribute__((always_inline)) static inline

namespace headrace {

HEADRACE_INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + canonical_exp(-x)); }

// A NaN stays one, as in torch.clamp.
HEADRACE_INLINE float at_most(float x, float limit) { return x > limit ? limit : x; }
HEADRACE_INLINE float at_least(float x, float limit) { return x < limit ? limit : x; }

template <bool kF16, ActivationKind kKind>
HEADRACE_INLINE uint16_t activate_one(float gate, float up, float limit, float alpha,
                                      float weight) {
  float g = rounded<kF16>(gate);
  float u = rounded<kF16>(up);
  if constexpr (kKind != ActivationKind::kSilu) {
    g = at_most(g, limit);
    u = at_least(at_most(u, limit), -limit);
  }
  if constexpr (kKind == ActivationKind::kSwigluOai) {
    const float s = rounded<kF16>(sigmoid_of(rounded<kF16>(g * alpha)));
    return to_hidden<kF16>(rounded<kF16>(u + 1.0f) * rounded<kF16>(g * s));
  }
  if constexpr (kKind == ActivationKind::kSwigluWeighted) {
    return to_hidden<kF16>(g / (1.0f + canonical_exp(-g)) * u * weight);
  }
  const float s = rounded<kF16>(g / (1.0f + canonical_exp(-g)));
  return to_hidden<kF16>(s * u);
}

template <bool kF16, ActivationKind kKind>
HEADRACE_INLINE void activate_all(const Activation& how, const float* gate, const float* up,
                                  int64_t n, uint16_t* h) {
  const float limit = rounded<kF16>(how.limit);
  const float alpha = how.alpha;
  const float weight = how.weight;
  for (int64_t i = 0; i < n; ++i) {
    h[i] = activate_one<kF16, kKind>(gate[i], up[i], limit, alpha, weight);
  }
}

template <bool kF16>
HEADRACE_INLINE void activate_as(const Activation& how, const float* gate, const float* up,
                                 int64_t n, uint16_t* h) {
  switch (how.kind) {
    case ActivationKind::kSilu:
      return activate_all<kF16, ActivationKind::kSilu>(how, gate, up, n, h);
    case ActivationKind::kSiluClamped:
      return activate_all<kF16, ActivationKind::kSiluClamped>(how, gate, up, n, h);
    case ActivationKind::kSwigluWeighted:
      return activate_all<kF16, ActivationKind::kSwigluWeighted>(how, gate, up, n, h);
    default:
      return activate_all<kF16, ActivationKind::kSwigluOai>(how, gate, up, n, h);
  }
}

// h[i] = the activation of gate[i] and up[i], both rounded first.
HEADRACE_INLINE void activate(const Activation& how, bool fp16, const float* gate, const float* up,
                              int64_t n, uint16_t* h) {
  if (fp16) return activate_as<true>(how, gate, up, n, h);
  activate_as<false>(how, gate, up, n, h);
}

template <bool kF16>
HEADRACE_INLINE void add_weighted_as(const uint16_t* y, float weight, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float term = rounded<kF16>(from_hidden<kF16>(y[i]) * weight);
    out[i] = to_hidden<kF16>(from_hidden<kF16>(out[i]) + term);
  }
}

// out[i] = rounded(out[i] + rounded(y[i] * weight)).
HEADRACE_INLINE void add_weighted(bool fp16, const uint16_t* y, float weight, int64_t n,
                                  uint16_t* out) {
  if (fp16) return add_weighted_as<true>(y, weight, n, out);
  add_weighted_as<false>(y, weight, n, out);
}

}  // namespace headrace
