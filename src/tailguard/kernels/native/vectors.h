// Vectors and elementary functions on them. Included by files that are compiled per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "networks.h"

namespace tailguard {
namespace LEVEL {

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST_ROWS = 12;
#elif defined(__AVX__)
constexpr int LANES = 8, MOST_ROWS = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4, MOST_ROWS = 6;
#else
constexpr int LANES = 4, MOST_ROWS = 3;
#endif
constexpr int VECTORS = PANEL / LANES;           // of a panel's row
constexpr int MOST_PANELS = LANES == 16 ? 2 : 1;  // side by side

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec load(const float *at) { return *reinterpret_cast<const loose_vec *>(at); }
static inline void store(float *at, vec value) { *reinterpret_cast<loose_vec *>(at) = value; }
static inline vec splat(float value) { return vec{} + value; }

// Elementary functions, to 1e-7.

// exp(y) - 1 = 2^n (r q(r)) + (2^n - 1), |r| <= ln(2)/2: exact in relative terms near zero
static inline vec expm1(vec y) {
    const vec most = splat(87.0f);
    y = y > most ? most : y;
    y = y < -most ? -most : y;
    const vec rounded = y * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number in the lowest bits
    const vec n = rounded - 12582912.0f;
    const vec r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    vec q = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
    q = r * q + 1.0f / 120.0f;
    q = r * q + 1.0f / 24.0f;
    q = r * q + 1.0f / 6.0f;
    q = r * q + 0.5f;
    q = r * q + 1.0f;
    const ivec bits = ((ivec)rounded + 127) << 23;
    const vec power = (vec)bits;
    return power * (r * q) + (power - 1.0f);
}

static inline vec sigmoid(vec x) { return 1.0f / (expm1(-x) + 2.0f); }

static inline vec tanh(vec x) {
    const vec e = expm1(x + x);
    return e / (e + 2.0f);
}

}  // namespace LEVEL
}  // namespace tailguard
