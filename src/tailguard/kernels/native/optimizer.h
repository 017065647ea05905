// Loops over the weights of an optimizer step, compiled once per instruction set (optimizer_level.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tailguard {

// A parameter in a gated step. Without moments (first is null) the direction is the gradient, with them it is Adam's,
// scale * m / (sqrt(v) + eps).
struct GatedPart {
    size_t size;
    float *weights;
    const float *gradient;
    float *utility, *first, *second;
    const float *noise;                           // null: none
    float keep_utility, keep_first, keep_second;  // what the averages take of the newest value
    float rate, decay, l2, sigma, scale, eps;
    double correction;  // bias correction of the utility's average
};

// What has to be known of weights before any of them moves
struct Survey {
    float lowest, highest;  // new utility
    float largest;          // magnitude of weights, gradient, new utility and moments; NaN or infinite where one is
};

// The observed blocks of one tensor's gradient
struct Observed {
    const float *gradient;
    const int64_t *starts, *lengths;
    size_t n_blocks;
    const float *mean;  // both means hold the observed elements one after another
    float *new_mean;
    float weight;  // of the gradient in the new mean
};

struct OptimizerLoops {
    Survey (*survey)(const GatedPart &part, size_t begin, size_t end);
    // Takes the averages over and moves the weights; returns the sum of the gates
    double (*move)(const GatedPart &part, size_t begin, size_t end, float centre, float width, bool protect_weights);
    double (*squared_norm)(const float *values, size_t size);
    // Fills the new mean and the sums of squares of the gradient and of the new mean
    void (*observe)(const Observed &tensor, double &power, double &signal);
};

}  // namespace tailguard
