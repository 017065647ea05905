// One step of the UPGD family and the noise of gradients (kernels/optimizer.py): loops that are compiled per level.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tailguard {

// A parameter in a gated step. Without moments (first is null) the direction is the gradient, with them it is Adam's.
struct GatedPart {
    std::size_t size;
    float *weights;
    const float *gradient;
    float *utility, *first, *second;
    const float *noise;  // null: none
    float keep_utility, keep_first, keep_second;  // what the averages take of the newest value
    float rate, decay, l2, sigma;
    float scale, eps;    // the direction is scale * m / (sqrt(v) + eps), which is Adam's bias-corrected one
    double correction;   // bias correction of the utility's average
};

// A magnitude as the bits of |x|, which are ordered like |x|; infinity and NaN are the largest.
using Magnitude = std::int32_t;

inline Magnitude magnitude_of(float x) {
    Magnitude bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

inline double value_of(Magnitude bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// What has to be known of some weights before any of them moves: the range of the new utility, and largest magnitudes.
struct Survey {
    float lowest = INFINITY, highest = -INFINITY;
    Magnitude weight = 0, gradient = 0, new_utility = 0, first = 0, second = 0;
};

// How large the direction of some weights is.
struct DirectionSize {
    double power = 0.0;  // sum of squares
    Magnitude largest = 0;
};

// The observed blocks of one tensor's gradient.
struct Observed {
    const float *gradient;
    const std::int64_t *starts, *lengths;
    std::size_t n_blocks;
    const float *mean;
    float *new_mean;  // both hold the observed elements one after another
    float weight;     // of the gradient in the new mean
};

struct OptimizerLoops {
    Survey (*survey)(const GatedPart &part, std::size_t begin, std::size_t end);
    DirectionSize (*direction_size)(const GatedPart &part, std::size_t begin, std::size_t end);
    // moves the weights and takes the averages over; returns the sum of the gates
    double (*move)(const GatedPart &part, std::size_t begin, std::size_t end, float centre, float width,
                   bool protect_weights);
    double (*squared_norm)(const float *values, std::size_t size);
    // fills new_mean, and the sums of squares of the gradient and of the new mean
    void (*observe)(const Observed &tensor, double &power, double &signal);
};

}  // namespace tailguard
