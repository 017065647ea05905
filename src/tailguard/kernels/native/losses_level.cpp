// The losses of actor and critics and their gradients, from sequences to weights. Compiled once per instruction set.
#include <cmath>
#include <cstring>

#include "trunk_level.h"

namespace tailguard {
namespace LEVEL {

// Quantile regression with a Huber zone of width kappa, divided by kappa

// One row: `above` and `below` are the levels and 1 - levels, zero beyond the last; all rows padded to whole panels.
// Fills the gradient; returns the sum of losses over levels, averaged over samples
static float huber_row(const float *quantiles, const float *samples, int n_samples, const float *above,
                       const float *below, int width, float kappa, float *gradient) {
    const float zone = kappa > 1e-20f ? kappa : 1e-20f, inverse = 1.0f / zone, share = 1.0f / float(n_samples);
    const vec high = splat(zone), low = -high;
    vec total = {};
    for (int j = 0; j < width; j += LANES) {
        const vec quantile = load(quantiles + j), weight_above = load(above + j), weight_below = load(below + j);
        vec loss = {}, slope = {};
        for (int k = 0; k < n_samples; ++k) {
            const vec error = samples[k] - quantile;
            vec near = error > high ? high : error;
            near = near < low ? low : near;
            const vec pull = (error >= 0.0f ? weight_above : weight_below) * (near * inverse);
            loss += pull * (error - 0.5f * near);
            slope -= pull;
        }
        total += loss;
        store(gradient + j, slope * share);
    }
    float sum = 0.0f;
    for (int j = 0; j < LANES; ++j) sum += total[j];
    return sum * share;
}

constexpr int MOST_LEVELS = 4096;

struct Levels {
    alignas(64) float above[MOST_LEVELS], below[MOST_LEVELS];

    INLINE Levels(const float *levels, int count) {
        for (int j = 0; j < padded(count); ++j) {
            above[j] = j < count ? levels[j] : 0.0f;
            below[j] = j < count ? 1.0f - levels[j] : 0.0f;
        }
    }
};

static void quantile_huber(const float *quantiles, int64_t n_rows, const float *samples, int n_samples,
                           const float *levels, int n_levels, float kappa, float *loss, float *gradient) {
    const Levels weights(levels, n_levels);
    const int width = padded(n_levels);
    alignas(64) float row[MOST_LEVELS], slopes[MOST_LEVELS];
    for (int j = n_levels; j < width; ++j) row[j] = 0.0f;
    for (int64_t m = 0; m < n_rows; ++m) {
        std::memcpy(row, quantiles + m * n_levels, sizeof(float) * n_levels);
        loss[m] = huber_row(row, samples + m * n_samples, n_samples, weights.above, weights.below, width, kappa, slopes);
        std::memcpy(gradient + m * n_levels, slopes, sizeof(float) * n_levels);
    }
}

// The actor

// Log-probability and entropy of one sample and their gradients, for the distribution of a row of outputs
struct Sample {
    const ShardTask &task;
    const float *output, *action;
    const double *inverse_std;  // (A) of a Gaussian
    double log_prob, entropy;

    INLINE void evaluate() {
        log_prob = entropy = 0.0;
        constexpr double half_log_2pi = 0.91893853320467274;
        int first = 0;
        for (int a = 0; a < task.n_actions; ++a) {
            if (task.log_std) {
                const double z = (double(action[a]) - output[a]) * inverse_std[a];
                log_prob += -0.5 * z * z - task.log_std[a] - half_log_2pi;
                entropy += task.log_std[a] + 0.5 + half_log_2pi;
            } else {
                const int n = task.n_choices[a];
                const double shift = log_total(output + first, n);
                log_prob += output[first + chosen(a)] - shift;
                entropy += entropy_of(output + first, n, shift);
                first += n;
            }
        }
    }

    INLINE void gradient(double d_log_prob, double d_entropy, float *d_output) const {
        int first = 0;
        for (int a = 0; a < task.n_actions; ++a) {
            if (task.log_std) {
                const double z = (double(action[a]) - output[a]) * inverse_std[a];
                d_output[a] = float(d_log_prob * z * inverse_std[a]);
                task.d_log_std[a] += d_log_prob * (z * z - 1.0) + d_entropy;
                continue;
            }
            const int n = task.n_choices[a];
            const double shift = log_total(output + first, n), own_entropy = entropy_of(output + first, n, shift);
            for (int k = first; k < first + n; ++k) {
                const double log_p = output[k] - shift, p = std::exp(log_p);
                const double taken = k == first + chosen(a) ? 1.0 : 0.0;
                d_output[k] = float(d_log_prob * (taken - p) - d_entropy * p * (log_p + own_entropy));
            }
            first += n;
        }
    }

    INLINE int chosen(int a) const {
        const int choice = int(action[a]);
        return choice < 0 ? 0 : choice < task.n_choices[a] ? choice : task.n_choices[a] - 1;
    }

    INLINE static double log_total(const float *logits, int n) {
        double largest = logits[0], total = 0.0;
        for (int k = 1; k < n; ++k) largest = logits[k] > largest ? logits[k] : largest;
        for (int k = 0; k < n; ++k) total += std::exp(logits[k] - largest);
        return largest + std::log(total);
    }

    INLINE static double entropy_of(const float *logits, int n, double shift) {
        double entropy = 0.0;
        for (int k = 0; k < n; ++k) entropy -= std::exp(logits[k] - shift) * (logits[k] - shift);
        return entropy;
    }
};

static void actor_block(ShardTask &task, const Block &block, const int64_t *chosen) {
    double inverse_std[64];
    for (int a = 0; task.log_std && a < task.n_actions; ++a) inverse_std[a] = std::exp(-double(task.log_std[a]));
    const int last = task.layout->n_dense - 1, stride = padded(task.layout->outputs());
    for (int m = 0; m < block.rows(); ++m) {
        const int64_t at = task.place(chosen, block.size, m);
        float *d_output = block.d_outputs[last] + size_t(m) * stride;
        if (!task.sequences.valid[at]) {
            std::memset(d_output, 0, sizeof(float) * stride);
            continue;
        }
        Sample sample{task, block.outputs[last] + size_t(m) * stride, task.actions + at * task.n_actions, inverse_std, 0, 0};
        sample.evaluate();
        const double log_ratio = sample.log_prob - task.log_probs[at], gain = task.advantages[at];
        const double ratio = std::exp(log_ratio), low = 1.0 - task.clip_range, high = 1.0 + task.clip_range;
        const double bounded = ratio < low ? low : ratio > high ? high : ratio;
        const bool pulls = ratio * gain <= bounded * gain;  // otherwise the bound counts, and it has no slope
        task.sums[0] -= pulls ? ratio * gain : bounded * gain;
        task.sums[1] += sample.entropy;
        task.sums[2] += std::expm1(log_ratio) - log_ratio;
        task.sums[3] += std::fabs(ratio - 1.0) > task.clip_range;
        if (!(std::fabs(log_ratio) <= task.sums[4])) task.sums[4] = std::fabs(log_ratio);
        const double d_log_prob = task.scale * (task.kl_beta * (ratio - 1.0) - (pulls ? ratio * gain : 0.0));
        sample.gradient(d_log_prob, -task.ent_coef * task.scale, d_output);
    }
}

// The critics

static void critic_block(ShardTask &task, const Block &block, const int64_t *chosen, const Levels &levels) {
    const int last = task.layout->n_dense - 1, stride = padded(task.layout->outputs());
    for (int m = 0; m < block.rows(); ++m) {
        const int64_t at = task.place(chosen, block.size, m);
        float *d_output = block.d_outputs[last] + size_t(m) * stride;
        if (!task.sequences.valid[at]) {
            std::memset(d_output, 0, sizeof(float) * stride);
            continue;
        }
        task.sums[0] += huber_row(block.outputs[last] + size_t(m) * stride, task.target + at * task.n_samples,
                                  task.n_samples, levels.above, levels.below, stride, task.kappa, d_output);
        for (int j = 0; j < stride; j += LANES) store(d_output + j, load(d_output + j) * float(task.scale));
    }
}

// Half the squared error of the risk value, and its gradient
static void risk_block(ShardTask &task, const Block &critic, const int64_t *chosen, Block &block) {
    const RiskTask &risk = *task.risk;
    const Layout &layout = *risk.layout;
    const int H = task.layout->features(), F = risk.n_observed, width = padded(layout.n_inputs);
    const int from = padded(H), stride = padded(1), last = layout.n_dense - 1, rows = critic.rows();
    const float *features = task.layout->n_dense > 1 ? critic.outputs[task.layout->n_dense - 2] : critic.features;
    for (int m = 0; m < rows; ++m) {
        const int64_t at = task.place(chosen, critic.size, m);
        float *x = block.features + size_t(m) * width;
        std::memset(x, 0, sizeof(float) * width);
        std::memcpy(x, features + size_t(m) * from, sizeof(float) * H);
        if (!task.sequences.valid[at]) continue;
        std::memcpy(x + H, risk.observations + at * F, sizeof(float) * F);
        std::memcpy(x + H + F, risk.target + at * 3, sizeof(float) * 2);
    }
    dense_forward(layout, *risk.packed, block.features, width, rows, block.outputs);
    for (int m = 0; m < rows; ++m) {
        const int64_t at = task.place(chosen, critic.size, m);
        const bool counts = task.sequences.valid[at];
        const float error = counts ? block.outputs[last][size_t(m) * stride] - risk.target[at * 3 + 2] : 0.0f;
        std::memset(block.d_outputs[last] + size_t(m) * stride, 0, sizeof(float) * stride);
        block.d_outputs[last][size_t(m) * stride] = float(task.scale) * error;
        task.sums[1] += 0.5 * double(error) * double(error);
    }
    dense_backward(layout, *risk.packed, block.features, width, rows, block.outputs, block.d_outputs, nullptr, false,
                   &risk.gradient);
}

// Gradients of outputs and features that the caller gives; returns whether there are some of the features
static bool given_block(ShardTask &task, Block &block, const int64_t *chosen, float *d_inputs) {
    const Layout &layout = *task.layout;
    const int last = layout.n_dense - 1, W = layout.outputs(), D = layout.features();
    float *begun = last > 0 ? block.d_outputs[last - 1] : layout.n_layers ? block.d_features : d_inputs;
    for (int m = 0; m < block.rows(); ++m) {
        const int64_t at = task.place(chosen, block.size, m);
        float *row = block.d_outputs[last] + size_t(m) * padded(W);
        std::memset(row, 0, sizeof(float) * padded(W));
        std::memcpy(row, task.d_output + at * W, sizeof(float) * W);
        if (!task.d_features || !begun) continue;
        std::memset(begun + size_t(m) * padded(D), 0, sizeof(float) * padded(D));
        std::memcpy(begun + size_t(m) * padded(D), task.d_features + at * D, sizeof(float) * D);
    }
    return task.d_features != nullptr;
}

// Hands out what a block's forward pass found
static void results_of(ShardTask &task, const Block &block, const int64_t *chosen) {
    const Layout &layout = *task.layout;
    const int W = layout.outputs(), D = layout.features(), last = layout.n_dense - 1;
    const float *features = last > 0 ? block.outputs[last - 1] : block.features;
    for (int m = 0; m < block.rows(); ++m) {
        const int64_t at = task.place(chosen, block.size, m);
        std::memcpy(task.output + at * W, block.outputs[last] + size_t(m) * padded(W), sizeof(float) * W);
        std::memcpy(task.features + at * D, features + size_t(m) * padded(D), sizeof(float) * D);
    }
}

static void run_shard(ShardTask &task) {
    const Layout &layout = *task.layout;
    const int size = task.size(), F = layout.n_inputs;
    const Levels levels(task.levels, task.loss == critic_loss ? layout.outputs() : 0);
    for (int64_t first = 0; first < task.n_chosen; first += size) {
        const int64_t *chosen = task.chosen + first;
        Arena arena{task.workspace + size_t(first / size) * task.kept};
        Block block, beside;
        float *d_inputs;
        task.plan(int(task.n_chosen - first < size ? task.n_chosen - first : size), block, beside, d_inputs, arena);
        if (task.pass != backward_pass) {
            gather(layout, task.sequences, task.chosen, first, block);
            forward(layout, *task.packed, block);
        }
        if (task.pass == forward_pass) {
            results_of(task, block, chosen);
            continue;
        }
        bool added = false;
        if (task.loss == actor_loss) actor_block(task, block, chosen);
        if (task.loss == critic_loss) critic_block(task, block, chosen, levels);
        if (task.loss == given_loss) added = given_block(task, block, chosen, d_inputs);
        if (task.risk) risk_block(task, block, chosen, beside);
        backward(layout, *task.packed, block, added, task.wants_gradient ? &task.gradient : nullptr, d_inputs);
        for (int m = 0; d_inputs && m < block.rows(); ++m)
            std::memcpy(task.d_x + task.place(chosen, block.size, m) * F, d_inputs + size_t(m) * padded(F), sizeof(float) * F);
    }
}

extern const Kernels network_kernels;
const Kernels network_kernels = {pack, gather, forward, backward, quantile_huber, run_shard};

}  // namespace LEVEL
}  // namespace tailguard
