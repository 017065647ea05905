// Loops over weights (optimizer.h). Sums run in LANES separate sums that are folded in a fixed order, so they vectorize
// without -ffast-math and do not depend on the width of vectors.
#include "optimizer.h"

#include <cmath>
#include <cstring>

namespace tailguard {
namespace LEVEL {

constexpr size_t LANES = 64;

template <typename Number>
static double folded(Number *lanes) {
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    return lanes[0];
}

// Calls body(i, lane) for every element
template <typename Body>
static inline void for_lanes(size_t begin, size_t end, Body body) {
    size_t i = begin;
    for (; i + LANES <= end; i += LANES)
#pragma GCC ivdep
        for (size_t j = 0; j < LANES; ++j) body(i + j, j);
#pragma GCC ivdep
    for (size_t j = 0; j < end - i; ++j) body(i + j, j);
}

static inline float averaged(float average, float newest, float keep) { return average + keep * (newest - average); }

// 2 (1 - sigmoid(x)) for x <= 1 within 1e-6, exactly 1 at 0: exp by a polynomial of x / 16 and four squarings
static inline float gate_of(float x) {
    const float y = (x > -20.0f ? x : -20.0f) * (1.0f / 16);  // below, exp(x) is lost beside 1
    float e = y * (1.0f / 5040) + 1.0f / 720;
    e = e * y + 1.0f / 120;
    e = e * y + 1.0f / 24;
    e = e * y + 1.0f / 6;
    e = e * y + 1.0f / 2;
    e = (e * y + 1.0f) * y + 1.0f;
    for (int i = 0; i < 4; ++i) e *= e;
    return 2.0f / (1.0f + e);
}

static Survey survey(const GatedPart &part, size_t begin, size_t end) {
    const float *w = part.weights, *g = part.gradient, *u = part.utility, *m = part.first, *v = part.second;
    const float keep = part.keep_utility;
    float low[LANES], high[LANES];
    int32_t most[LANES] = {};  // bits of magnitudes are ordered as they are, and NaN comes last
    for (size_t j = 0; j < LANES; ++j) low[j] = INFINITY, high[j] = -INFINITY;
    const auto see = [&](size_t j, float x) {
        int32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        bits &= 0x7fffffff;
        most[j] = bits > most[j] ? bits : most[j];
    };
    for_lanes(begin, end, [&](size_t i, size_t j) {
        const float next = averaged(u[i], -(g[i] * w[i]), keep);
        low[j] = next < low[j] ? next : low[j];
        high[j] = next > high[j] ? next : high[j];
        see(j, w[i]);
        see(j, g[i]);
        see(j, next);
    });
    if (m)
        for_lanes(begin, end, [&](size_t i, size_t j) {
            see(j, m[i]);
            see(j, v[i]);
        });
    for (size_t j = 1; j < LANES; ++j) {
        low[0] = low[j] < low[0] ? low[j] : low[0];
        high[0] = high[j] > high[0] ? high[j] : high[0];
        most[0] = most[j] > most[0] ? most[j] : most[0];
    }
    Survey found{low[0], high[0], 0.0f};
    std::memcpy(&found.largest, most, sizeof found.largest);
    return found;
}

template <bool MOMENTS, bool NOISE>
static double move_as(const GatedPart &part, size_t begin, size_t end, float centre, float width, bool protect_weights) {
    float *w = part.weights, *u = part.utility, *m = part.first, *v = part.second;
    const float *g = part.gradient, *noise = part.noise;
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

static double move(const GatedPart &part, size_t begin, size_t end, float centre, float width, bool protect_weights) {
    const auto loop = part.first ? (part.noise ? &move_as<true, true> : &move_as<true, false>)
                                 : (part.noise ? &move_as<false, true> : &move_as<false, false>);
    return loop(part, begin, end, centre, width, protect_weights);
}

static double squared_norm(const float *values, size_t size) {
    double power[LANES] = {};
    for_lanes(0, size, [&](size_t i, size_t j) { power[j] += double(values[i]) * values[i]; });
    return folded(power);
}

static void observe(const Observed &tensor, double &power, double &signal) {
    double powers[LANES] = {}, signals[LANES] = {};
    const float *mean = tensor.mean;
    float *new_mean = tensor.new_mean;
    for (size_t b = 0; b < tensor.n_blocks; ++b) {
        const float *g = tensor.gradient + tensor.starts[b];
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

extern const OptimizerLoops optimizer_loops;
const OptimizerLoops optimizer_loops = {survey, move, squared_norm, observe};

}  // namespace LEVEL
}  // namespace tailguard
