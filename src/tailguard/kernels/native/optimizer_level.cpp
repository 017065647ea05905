// Loops over weights (optimizer.h), compiled once per instruction set. Sums run in LANES separate sums that are folded
// in a fixed order, so they vectorize without -ffast-math and do not depend on the width of vectors.
#include "optimizer.h"

namespace tailguard::LEVEL {

using std::size_t;

namespace {

constexpr size_t LANES = 64;

struct Largest {
    Magnitude lanes[LANES] = {};
    inline void see(size_t j, float x) {
        const Magnitude size = magnitude_of(x);
        lanes[j] = size > lanes[j] ? size : lanes[j];
    }
    Magnitude value() const {
        Magnitude most = 0;
        for (Magnitude lane : lanes) most = lane > most ? lane : most;
        return most;
    }
};

template <typename Number>
double folded(Number *lanes) {
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    return lanes[0];
}

// body(i, j) for every element, j = its lane
template <typename Body>
inline void for_lanes(size_t begin, size_t end, Body body) {
    size_t i = begin;
    for (; i + LANES <= end; i += LANES)
#pragma GCC ivdep
        for (size_t j = 0; j < LANES; ++j) body(i + j, j);
#pragma GCC ivdep
    for (size_t j = 0; j < end - i; ++j) body(i + j, j);
}

inline float averaged(float average, float newest, float keep) { return average + keep * (newest - average); }

// 2 (1 - sigmoid(x)) for x <= 1 within 1e-6, exactly 1 at 0: exp by a polynomial of x / 16 and four squarings.
inline float gate_of(float x) {
    const float y = (x > -20.0f ? x : -20.0f) * (1.0f / 16);  // below, exp(x) is lost beside 1
    float e = 1.0f + y * (1.0f + y * (1.0f / 2 + y * (1.0f / 6 + y * (1.0f / 24 + y * (1.0f / 120 + y * (1.0f / 720 + y * (1.0f / 5040)))))));
    e *= e;
    e *= e;
    e *= e;
    e *= e;
    return 2.0f / (1.0f + e);
}

Survey survey(const GatedPart &part, size_t begin, size_t end) {
    const float *__restrict w = part.weights, *__restrict g = part.gradient, *__restrict u = part.utility;
    const float keep = part.keep_utility;
    float low[LANES], high[LANES];
    for (size_t j = 0; j < LANES; ++j) low[j] = INFINITY, high[j] = -INFINITY;
    Largest weight, gradient, utility, first, second;
    for_lanes(begin, end, [&](size_t i, size_t j) {
        const float next = averaged(u[i], -(g[i] * w[i]), keep);
        low[j] = next < low[j] ? next : low[j];
        high[j] = next > high[j] ? next : high[j];
        weight.see(j, w[i]);
        gradient.see(j, g[i]);
        utility.see(j, next);
    });
    if (part.first) {
        const float *__restrict m = part.first, *__restrict v = part.second;
        for_lanes(begin, end, [&](size_t i, size_t j) {
            first.see(j, m[i]);
            second.see(j, v[i]);
        });
    }
    for (size_t j = 1; j < LANES; ++j) {
        low[0] = low[j] < low[0] ? low[j] : low[0];
        high[0] = high[j] > high[0] ? high[j] : high[0];
    }
    return {low[0], high[0], weight.value(), gradient.value(), utility.value(), first.value(), second.value()};
}

DirectionSize direction_size(const GatedPart &part, size_t begin, size_t end) {
    const float *__restrict w = part.weights, *__restrict g = part.gradient;
    const float *__restrict m = part.first, *__restrict v = part.second;
    const float keep1 = part.keep_first, keep2 = part.keep_second, l2 = part.l2, scale = part.scale, eps = part.eps;
    double power[LANES] = {};
    Largest largest;
    const auto see = [&](size_t j, float direction) {
        power[j] += double(direction) * direction;
        largest.see(j, direction);
    };
    if (m)
        for_lanes(begin, end, [&](size_t i, size_t j) {
            const float d = g[i] + l2 * w[i];
            see(j, scale * averaged(m[i], d, keep1) / (std::sqrt(averaged(v[i], d * d, keep2)) + eps));
        });
    else
        for_lanes(begin, end, [&](size_t i, size_t j) { see(j, g[i]); });
    return {folded(power), largest.value()};
}

template <bool MOMENTS, bool NOISE>
double move_as(const GatedPart &part, size_t begin, size_t end, float centre, float width, bool protect_weights) {
    float *__restrict w = part.weights, *__restrict u = part.utility;
    float *__restrict m = part.first, *__restrict v = part.second;
    const float *__restrict g = part.gradient, *__restrict noise = part.noise;
    const float keep = part.keep_utility, keep1 = part.keep_first, keep2 = part.keep_second, l2 = part.l2;
    const float rate = part.rate, decay = part.decay, sigma = part.sigma, scale = part.scale, eps = part.eps;
    const float ungated = protect_weights ? 0.0f : 1.0f;  // share of the direction that passes without the gate
    float gates[LANES] = {};
    for_lanes(begin, end, [&](size_t i, size_t j) {
        const float weight = w[i], next = averaged(u[i], -(g[i] * weight), keep);
        const float gate = gate_of((next - centre) / width);
        gates[j] += gate;
        u[i] = next;
        float step = g[i];
        if constexpr (MOMENTS) {
            const float d = g[i] + l2 * weight;
            const float first = averaged(m[i], d, keep1), second = averaged(v[i], d * d, keep2);
            m[i] = first;
            v[i] = second;
            step = scale * first / (std::sqrt(second) + eps);
        }
        step *= ungated + (1.0f - ungated) * gate;
        if constexpr (NOISE) step += gate * (sigma * noise[i]);
        w[i] = decay * weight - rate * step;
    });
    return folded(gates);
}

double move(const GatedPart &part, size_t begin, size_t end, float centre, float width, bool protect_weights) {
    const auto loop = part.first ? (part.noise ? &move_as<true, true> : &move_as<true, false>)
                                 : (part.noise ? &move_as<false, true> : &move_as<false, false>);
    return loop(part, begin, end, centre, width, protect_weights);
}

double squared_norm(const float *values, size_t size) {
    double power[LANES] = {};
    for_lanes(0, size, [&](size_t i, size_t j) { power[j] += double(values[i]) * values[i]; });
    return folded(power);
}

void observe(const Observed &tensor, double &power, double &signal) {
    double powers[LANES] = {}, signals[LANES] = {};
    const float *__restrict mean = tensor.mean;
    float *__restrict new_mean = tensor.new_mean;
    for (size_t b = 0; b < tensor.n_blocks; ++b) {
        const float *__restrict g = tensor.gradient + tensor.starts[b];
        const size_t length = tensor.lengths[b];
        for_lanes(0, length, [&](size_t i, size_t j) {
            const float next = averaged(mean[i], g[i], tensor.weight);
            new_mean[i] = next;
            powers[j] += double(g[i]) * g[i];
            signals[j] += double(next) * next;
        });
        mean += length;
        new_mean += length;
    }
    power = folded(powers);
    signal = folded(signals);
}

}  // namespace

extern const OptimizerLoops optimizer_loops;
const OptimizerLoops optimizer_loops = {survey, direction_size, move, squared_norm, observe};

}  // namespace tailguard::LEVEL
