// Test program of the kernels that need no Python: trunks forward and backward against plain loops in double precision
// and finite differences, the quantile loss, optimizer steps, and the thread pool. Prints what failed; ends with 0 if
// nothing did.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "levels.h"
#include "networks.h"
#include "optimizer.h"
#include "pool.h"

DECLARE_LEVELS(OptimizerLoops, optimizer_loops)

using namespace tailguard;

static int failures = 0;
static std::mt19937 rng(0);

static void check(bool holds, const char *what, double found = 0.0, double wanted = 0.0) {
    if (holds) return;
    ++failures;
    std::printf("FAILED: %s (%g, expected %g)\n", what, found, wanted);
}

static int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

static std::vector<float> random_numbers(size_t count, float size = 1.0f) {
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<float> numbers(count);
    for (float &number : numbers) number = normal(rng);
    return numbers;
}

struct Problem {
    Layout layout;
    int n_steps, n;
    std::vector<float> weights, x, hidden, cell, towards;
    std::vector<uint8_t> starts;

    Problem() {
        layout.n_inputs = between(1, 19), layout.n_layers = between(0, 2), layout.relu = between(0, 1);
        layout.n_units = layout.n_layers ? between(1, 37) : 0;
        int64_t at = 0, H = layout.n_units;
        for (int k = 0; k < layout.n_layers; ++k) {
            const int64_t inputs = k == 0 ? layout.n_inputs : H;
            layout.recurrent[k] = {at, at + 4 * H * inputs, at + 4 * H * (inputs + H)};
            at += 4 * H * (inputs + H + 1);
        }
        layout.n_dense = between(1, 3);
        int inputs = layout.n_layers ? layout.n_units : layout.n_inputs;
        for (int k = 0; k < layout.n_dense; ++k) {
            const int outputs = between(1, 37);
            layout.dense[k] = {at, at + outputs * inputs, outputs, inputs};
            at += outputs * inputs + outputs, inputs = outputs;
        }
        n_steps = between(1, 9), n = between(1, 21);
        weights = random_numbers(at, 0.3f), x = random_numbers(size_t(n_steps) * n * layout.n_inputs);
        hidden = random_numbers(layout.n_layers * n * H), cell = random_numbers(layout.n_layers * n * H);
        towards = random_numbers(size_t(n_steps) * n * inputs);
        for (int i = 0; i < n_steps * n; ++i) starts.push_back(between(0, 6) == 0);
    }

    // Sum of outputs times `towards`, in plain loops
    double loss(const std::vector<double> &w, std::vector<double> *outputs = nullptr) const {
        double total = 0.0;
        for (int i = 0; i < n; ++i) {
            const int H = layout.n_units;
            std::vector<std::vector<double>> h(layout.n_layers), c(layout.n_layers);
            for (int k = 0; k < layout.n_layers; ++k)
                for (int j = 0; j < H; ++j) {
                    h[k].push_back(hidden[(size_t(k) * n + i) * H + j]);
                    c[k].push_back(cell[(size_t(k) * n + i) * H + j]);
                }
            for (int t = 0; t < n_steps; ++t) {
                const size_t row = size_t(t) * n + i;
                std::vector<double> in(x.begin() + row * layout.n_inputs, x.begin() + (row + 1) * layout.n_inputs);
                for (int k = 0; k < layout.n_layers; ++k) {
                    if (starts[row]) h[k].assign(H, 0.0), c[k].assign(H, 0.0);
                    std::vector<double> gates(4 * H);
                    for (int g = 0; g < 4 * H; ++g) {
                        gates[g] = w[layout.recurrent[k].bias + g];
                        for (size_t j = 0; j < in.size(); ++j)
                            gates[g] += w[layout.recurrent[k].input_weight + g * in.size() + j] * in[j];
                        for (int j = 0; j < H; ++j) gates[g] += w[layout.recurrent[k].hidden_weight + g * H + j] * h[k][j];
                    }
                    auto sigmoid = [](double z) { return 1.0 / (1.0 + std::exp(-z)); };
                    for (int j = 0; j < H; ++j) {
                        c[k][j] = sigmoid(gates[H + j]) * c[k][j] + sigmoid(gates[j]) * std::tanh(gates[2 * H + j]);
                        h[k][j] = sigmoid(gates[3 * H + j]) * std::tanh(c[k][j]);
                    }
                    in = h[k];
                }
                for (int k = 0; k < layout.n_dense; ++k) {
                    const Dense &dense = layout.dense[k];
                    std::vector<double> out(dense.outputs);
                    for (int o = 0; o < dense.outputs; ++o) {
                        out[o] = w[dense.bias + o];
                        for (int j = 0; j < dense.inputs; ++j) out[o] += w[dense.weight + o * dense.inputs + j] * in[j];
                        if (k + 1 < layout.n_dense) out[o] = layout.relu ? std::fmax(out[o], 0.0) : std::tanh(out[o]);
                    }
                    in = out;
                }
                for (size_t o = 0; o < in.size(); ++o) {
                    total += in[o] * towards[row * in.size() + o];
                    if (outputs) (*outputs)[row * in.size() + o] = in[o];
                }
            }
        }
        return total;
    }
};

template <typename Plan>
static std::vector<float> planned(Plan plan) {
    Arena size;
    plan(size);
    std::vector<float> room(size.used, 0.0f);
    Arena arena{room.data()};
    plan(arena);
    return room;
}

static void test_trunk() {
    Problem problem;
    const Layout &layout = problem.layout;
    Packed packed;
    Block block;
    Gradient gradient;
    auto packed_room = planned([&](Arena &arena) { packed = Packed::plan(layout, true, arena); });
    auto block_room = planned([&](Arena &arena) { block = Block::plan(layout, problem.n_steps, problem.n, true, arena); });
    auto gradient_room = planned([&](Arena &arena) { gradient = Gradient::plan(layout, arena); });
    const Sequences sequences{problem.x.data(),      problem.starts.data(), nullptr, problem.hidden.data(),
                              problem.cell.data(), problem.n};
    kernels().pack(layout, problem.weights.data(), packed);
    kernels().gather(layout, sequences, nullptr, 0, block);
    kernels().forward(layout, packed, block);

    const int width = layout.outputs(), stride = padded(width), last = layout.n_dense - 1;
    std::vector<double> exact(problem.weights.begin(), problem.weights.end()), outputs(problem.towards.size());
    problem.loss(exact, &outputs);
    for (int m = 0; m < block.rows(); ++m)
        for (int o = 0; o < width; ++o) {
            const double found = block.outputs[last][m * stride + o], wanted = outputs[m * width + o];
            check(std::fabs(found - wanted) <= 2e-6 * (1.0 + std::fabs(wanted)), "output of a trunk", found, wanted);
            block.d_outputs[last][m * stride + o] = problem.towards[m * width + o];
        }
    kernels().backward(layout, packed, block, false, &gradient, nullptr);

    auto difference = [&](int64_t at) {
        auto higher = exact, lower = exact;
        higher[at] += 1e-5, lower[at] -= 1e-5;
        return (problem.loss(higher) - problem.loss(lower)) / 2e-5;
    };
    auto expect = [&](double found, int64_t at, const char *what) {
        const double wanted = difference(at);
        check(std::fabs(found - wanted) <= 2e-4 * (1.0 + std::fabs(wanted)), what, found, wanted);
    };
    for (int k = 0; k < layout.n_layers; ++k) {
        const int H = layout.n_units, row_of = padded(layout.columns(k)), inputs = k == 0 ? layout.n_inputs : H;
        const int gate = between(0, 3), r = between(0, H - 1), j = between(0, H - 1), f = between(0, inputs - 1);
        const float *row = gradient.recurrent[k] + (gate * layout.units() + r) * row_of;
        expect(row[j], layout.recurrent[k].hidden_weight + (gate * H + r) * H + j, "gradient of a hidden weight");
        expect(row[layout.units() + f], layout.recurrent[k].input_weight + (gate * H + r) * inputs + f, "gradient of an input weight");
        expect(row[layout.columns(k) - 1], layout.recurrent[k].bias + gate * H + r, "gradient of a gate's bias");
    }
    for (int k = 0; k < layout.n_dense; ++k) {
        const Dense &dense = layout.dense[k];
        const int o = between(0, dense.outputs - 1), j = between(0, dense.inputs - 1);
        expect(gradient.dense[k][o * padded(dense.inputs) + j], dense.weight + o * dense.inputs + j, "gradient of a weight");
        expect(gradient.bias[k][o], dense.bias + o, "gradient of a bias");
    }
}

static void test_quantile_huber() {
    const int n_rows = between(1, 9), Q = between(1, 201), K = between(1, 40);
    const float kappa = between(0, 1) ? 1.0f : 0.0f;
    const auto quantiles = random_numbers(n_rows * Q), samples = random_numbers(n_rows * K);
    std::vector<float> levels, loss(n_rows), gradient(n_rows * Q);
    for (int q = 0; q < Q; ++q) levels.push_back((q + 0.5f) / Q);
    kernels().quantile_huber(quantiles.data(), n_rows, samples.data(), K, levels.data(), Q, kappa, loss.data(), gradient.data());
    for (int m = 0; m < n_rows; ++m) {
        double total = 0.0;
        for (int q = 0; q < Q; ++q) {
            double slope = 0.0;
            for (int k = 0; k < K; ++k) {
                const double error = double(samples[m * K + k]) - quantiles[m * Q + q], size = std::fabs(error);
                const double weight = error >= 0 ? levels[q] : 1.0 - levels[q];
                total += weight * (size <= kappa ? 0.5 * size * size / kappa : size - 0.5 * kappa) / K;
                slope -= weight * (size <= kappa ? error / kappa : error > 0 ? 1.0 : -1.0) / K;
            }
            check(std::fabs(gradient[m * Q + q] - slope) <= 1e-5, "gradient of the quantile loss", gradient[m * Q + q], slope);
        }
        check(std::fabs(loss[m] - total) <= 1e-5 * (1.0 + total), "quantile loss", loss[m], total);
    }
}

// Each number is squared once, whatever the number of threads, from several threads at once
static void near(double found, double wanted, double share, const char *what) {
    check(std::fabs(found - wanted) <= share * (1.0 + std::fabs(wanted)), what, found, wanted);
}

// One gated step, a norm, and an observed gradient against plain loops in double precision
static void test_optimizer() {
    const OptimizerLoops &loops = BEST_LEVEL(optimizer_loops);
    const size_t n = between(1, 300);
    auto w = random_numbers(n), g = random_numbers(n), u = random_numbers(n, 0.3f), m = random_numbers(n), v = w;
    const auto noise = random_numbers(n);
    for (float &square : v) square *= square;
    const bool moments = between(0, 1), protect = between(0, 1);
    const GatedPart part{n, w.data(), g.data(), u.data(), moments ? m.data() : nullptr, moments ? v.data() : nullptr,
                         noise.data(), 0.1f, 0.2f, 0.01f, 0.01f, 0.999f, 0.1f, 0.1f, 1.5f, 1e-3f, 1.0};
    const auto before_w = w, before_u = u, before_m = m, before_v = v;
    const Survey survey = loops.survey(part, 0, n);
    const double gates = loops.move(part, 0, n, 0.1f, 2.0f, protect);
    double low = 1e30, high = -1e30, total = 0.0, largest = 0.0, norm = 0.0;
    for (size_t i = 0; i < n; ++i) {
        const double weight = before_w[i], utility = before_u[i] + 0.1 * (-g[i] * weight - before_u[i]);
        const double gate = 2.0 / (1.0 + std::exp((utility - 0.1) / 2.0)), pull = g[i] + 0.1 * weight;
        const double first = before_m[i] + 0.2 * (pull - before_m[i]);
        const double second = before_v[i] + 0.01 * (pull * pull - before_v[i]);
        const double along = moments ? 1.5 * first / (std::sqrt(second) + 1e-3) : g[i];
        low = std::min(low, utility), high = std::max(high, utility), total += gate, norm += double(g[i]) * g[i];
        for (double x : {weight, double(g[i]), utility}) largest = std::max(largest, std::fabs(x));
        if (moments) largest = std::max({largest, std::fabs(double(before_m[i])), double(before_v[i])});
        near(u[i], utility, 1e-5, "utility of a weight");
        near(w[i], 0.999 * weight - 0.01 * ((protect ? gate : 1.0) * along + gate * 0.1 * noise[i]), 1e-5, "a gated step");
    }
    near(survey.lowest, low, 1e-5, "lowest utility"), near(survey.highest, high, 1e-5, "highest utility");
    near(survey.largest, largest, 1e-5, "largest magnitude"), near(gates, total, 1e-5, "sum of gates");
    near(loops.squared_norm(g.data(), n), norm, 1e-9, "squared norm");
    w[n / 2] = NAN;
    check(!(loops.survey(part, 0, n).largest <= 3e38f), "a weight that is not a number is seen");

    const int64_t start = between(0, int(n) - 1), length = between(1, int(n - start));
    std::vector<float> mean = random_numbers(length), after(length);
    double power = 0.0, signal = 0.0, wanted_power = 0.0, wanted_signal = 0.0;
    loops.observe({g.data(), &start, &length, 1, mean.data(), after.data(), 0.25f}, power, signal);
    for (int64_t i = 0; i < length; ++i) {
        const double newest = g[start + i], average = mean[i] + 0.25 * (newest - mean[i]);
        near(after[i], average, 1e-5, "mean of a gradient");
        wanted_power += newest * newest, wanted_signal += average * average;
    }
    near(power, wanted_power, 1e-9, "power of a gradient"), near(signal, wanted_signal, 1e-5, "power of a mean");
}

static void test_pool() {
    auto square_all = [](int n_tasks, int n_threads) {
        std::vector<std::atomic<int>> calls(n_tasks);
        parallel(n_tasks, n_threads, [&](int i) { calls[i] += i + 1; });
        for (int i = 0; i < n_tasks; ++i)
            if (calls[i] != i + 1) return false;
        return true;
    };
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([&, t] {
            for (int i = 0; i < 200; ++i) wrong += !square_all(i % 7, 1 + (i + t) % 4);
        });
    for (std::thread &thread : threads) thread.join();
    check(wrong == 0, "tasks of the pool are called once");
    bool raised = false;
    try {
        parallel(8, 3, [](int i) {
            if (i == 5) throw std::runtime_error("five");
        });
    } catch (const std::runtime_error &error) {
        raised = std::strcmp(error.what(), "five") == 0;
    }
    check(raised, "an exception of a task reaches the caller");
    if (const pid_t child = fork(); child == 0) {
        alarm(60);
        _exit(square_all(50, 3) ? 0 : 1);
    } else {
        int status = 0;
        waitpid(child, &status, 0);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child has a pool of its own");
    }
}

int main() {
    for (int i = 0; i < 60; ++i) test_trunk(), test_quantile_huber(), test_optimizer();
    test_pool();
    std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures != 0;
}
