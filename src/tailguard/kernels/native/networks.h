// What the kernels of the networks share: where weights lie, what a block of sequences needs, and the functions that
// exist once per instruction set.
//
// Letters: L steps, S sequences of a rollout, b of them in a block, rows = L b, F inputs, H units of a recurrent layer.
// Inside a block every row of numbers is padded to whole panels of 16 columns; each gate has padded(H) columns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tailguard {

// Code of this file is compiled per instruction set: a copy shared between them could be one that a processor lacks.
#define INLINE [[gnu::always_inline]] inline

constexpr int PANEL = 16;        // columns of a panel
constexpr int MOST_LAYERS = 16;  // of each kind
constexpr int N_SHARDS = 2;      // that a batch is cut into, whatever the number of threads
constexpr int MOST_SEQUENCES = 64, MOST_ROWS_OF_A_BLOCK = 1024;  // one sequence of any length fits

INLINE int padded(int width) { return (width + PANEL - 1) / PANEL * PANEL; }

struct Recurrent {
    int64_t input_weight, hidden_weight, bias;  // offsets of (4H, inputs), (4H, H), (4H)
};

struct Dense {
    int64_t weight, bias;  // offsets of (outputs, inputs), (outputs)
    int outputs, inputs;
};

struct Layout {
    int n_inputs = 0, n_units = 0, n_layers = 0, n_dense = 0;
    bool relu = false;
    Recurrent recurrent[MOST_LAYERS];
    Dense dense[MOST_LAYERS];

    INLINE int units() const { return padded(n_units); }
    INLINE int inputs_of(int layer) const { return layer == 0 ? n_inputs : units(); }   // as they lie in a block
    INLINE int columns(int layer) const { return units() + inputs_of(layer) + 1; }      // [hidden | input | 1]
    INLINE int gates() const { return 4 * units(); }
    INLINE int gate_stride() const { return gates() + PANEL; }  // rows 4 KB apart would compete for the same lines of the cache
    INLINE int features() const { return dense[n_dense - 1].inputs; }
    INLINE int outputs() const { return dense[n_dense - 1].outputs; }
};

// Hands out parts of one array of float32, each beginning with a line of the cache.
struct Arena {
    float *at = nullptr;
    size_t used = 0;

    INLINE float *take(size_t count) {
        float *part = at ? at + used : nullptr;
        used += (count + PANEL - 1) / PANEL * PANEL;
        return part;
    }
};

// Copies of a trunk's weights in the order in which the products read them: panels of (depth, 16).
struct Packed {
    float *recurrent[MOST_LAYERS], *dense[MOST_LAYERS], *bias[MOST_LAYERS];         // forward
    float *hidden_back[MOST_LAYERS], *input_back[MOST_LAYERS], *dense_back[MOST_LAYERS];  // backward

    INLINE static Packed plan(const Layout &layout, bool with_backward, Arena &arena) {
        Packed packed{};
        for (int k = 0; k < layout.n_layers; ++k) {
            packed.recurrent[k] = arena.take(size_t(layout.gates()) * layout.columns(k));
            if (!with_backward) continue;
            packed.hidden_back[k] = arena.take(size_t(layout.gates()) * layout.units());
            packed.input_back[k] = arena.take(size_t(layout.gates()) * padded(layout.inputs_of(k)));
        }
        for (int k = 0; k < layout.n_dense; ++k) {
            const Dense &dense = layout.dense[k];
            packed.dense[k] = arena.take(size_t(padded(dense.outputs)) * dense.inputs);
            packed.bias[k] = arena.take(padded(dense.outputs));
            if (with_backward) packed.dense_back[k] = arena.take(size_t(padded(dense.inputs)) * dense.outputs);
        }
        return packed;
    }
};

// A shard's sum of gradients, each weight with rows padded to whole panels.
struct Gradient {
    float *recurrent[MOST_LAYERS];  // (4 units, padded columns): [hidden | input | bias]
    float *dense[MOST_LAYERS];      // (outputs, padded inputs)
    float *bias[MOST_LAYERS];       // (padded outputs)

    INLINE static Gradient plan(const Layout &layout, Arena &arena) {
        Gradient gradient{};
        for (int k = 0; k < layout.n_layers; ++k)
            gradient.recurrent[k] = arena.take(size_t(layout.gates()) * padded(layout.columns(k)));
        for (int k = 0; k < layout.n_dense; ++k) {
            gradient.dense[k] = arena.take(size_t(layout.dense[k].outputs) * padded(layout.dense[k].inputs));
            gradient.bias[k] = arena.take(padded(layout.dense[k].outputs));
        }
        return gradient;
    }
};

// What a trunk computes of L steps of b sequences; the backward pass reads it again.
struct Block {
    int n_steps, size;
    float *kept;                         // (L, b) 0 where an episode starts, 1 elsewhere
    float *first_cell[MOST_LAYERS];      // (b, units)
    float *joined[MOST_LAYERS];          // (rows, padded columns): [hidden before | input | 1]
    float *gates[MOST_LAYERS];           // (rows, gate stride)
    float *cells[MOST_LAYERS];           // (rows, units)
    float *squashed[MOST_LAYERS];        // (rows, units) tanh of the cells
    float *features;                     // (rows, units or padded inputs) what the dense layers read
    float *outputs[MOST_LAYERS];         // (rows, padded outputs) of each dense layer
    float *d_outputs[MOST_LAYERS];       // their gradients
    float *d_features;                   // (rows, units or padded inputs)
    float *d_hidden, *d_cell;            // (b, units) of the state one step back

    INLINE int rows() const { return n_steps * size; }

    INLINE static Block plan(const Layout &layout, int n_steps, int size, bool with_backward, Arena &arena) {
        Block block{};
        block.n_steps = n_steps, block.size = size;
        const size_t rows = size_t(n_steps) * size, units = layout.units();
        block.kept = arena.take(rows);
        for (int k = 0; k < layout.n_layers; ++k) {
            block.first_cell[k] = arena.take(size * units);
            block.joined[k] = arena.take(rows * padded(layout.columns(k)));
            block.gates[k] = arena.take(rows * layout.gate_stride());
            block.cells[k] = arena.take(rows * units);
            block.squashed[k] = arena.take(rows * units);
        }
        const size_t width = padded(layout.n_layers ? layout.n_units : layout.n_inputs);
        block.features = arena.take(rows * width);
        for (int k = 0; k < layout.n_dense; ++k) block.outputs[k] = arena.take(rows * padded(layout.dense[k].outputs));
        if (!with_backward) return block;
        for (int k = 0; k < layout.n_dense; ++k) block.d_outputs[k] = arena.take(rows * padded(layout.dense[k].outputs));
        block.d_features = arena.take(rows * width);
        block.d_hidden = arena.take(size * units);
        block.d_cell = arena.take(size * units);
        return block;
    }
};

// Sequences of a rollout as callers hold them.
struct Sequences {
    const float *x;         // (L, S, F)
    const uint8_t *starts;  // (L, S) or none: an episode starts at the step, its state is zero
    const uint8_t *valid;   // (L, S) or none: of a step that is not valid, inputs that are not finite count as zero
    const float *hidden, *cell;  // (layers, S, H) before the first step
    int64_t n_sequences;         // S

    INLINE Sequences from(int64_t step, int n_inputs) const {
        Sequences later = *this;
        later.x += step * n_sequences * n_inputs;
        if (starts) later.starts += step * n_sequences;
        if (valid) later.valid += step * n_sequences;
        return later;
    }
};

// The risk value of a critic: dense layers on [features of the critic, observation, period].
struct RiskTask {
    const Layout *layout;
    const Packed *packed;
    Gradient gradient;
    const float *observations;  // (L, S, n_observed)
    int n_observed;
    const float *target;  // (L, S, 3) period features and target
};

enum Loss { actor_loss, critic_loss, given_loss };
enum Pass { both_passes, forward_pass, backward_pass };

// One shard of a batch through a trunk and its loss: several blocks one after another in one workspace, or each in its
// own where the backward pass comes later.
struct ShardTask {
    Loss loss;
    Pass pass;
    size_t kept;  // numbers from one block to the next in the workspace; 0 where all blocks share it
    const Layout *layout;
    const Packed *packed;
    Gradient gradient;
    bool wants_gradient;
    Sequences sequences;
    const int64_t *chosen;  // sequences of this shard
    int64_t n_chosen;
    int n_steps;
    float *workspace;
    double sums[5], scale;

    // the actor
    const float *actions, *log_probs, *advantages, *log_std;  // (L, S, A), (L, S), (L, S), (A) or none if categorical
    int n_actions;
    const int *n_choices;  // (A)
    double clip_range, ent_coef, kl_beta;
    double *d_log_std;  // (A)

    // a critic
    const float *target, *levels;  // (L, S, K), (Q)
    int n_samples;
    float kappa;
    const RiskTask *risk;  // or none

    // given gradients of outputs and features (or none); what they say of x, where it is asked for
    const float *d_output, *d_features;  // (L, S, W), (L, S, D)
    float *d_x;                          // (L, S, F)
    float *output, *features;            // (L, S, W), (L, S, D) written by a forward pass alone

    // Sequences in a block: as many rows as stay in the cache, and enough sequences for a product
    INLINE int size() const {
        const int64_t fitting = MOST_ROWS_OF_A_BLOCK / n_steps;
        const int64_t size = fitting < 16 ? 16 : fitting > MOST_SEQUENCES ? MOST_SEQUENCES : fitting;
        return int(n_chosen < size ? n_chosen : size);
    }
    INLINE int64_t place(const int64_t *of_block, int size, int m) const {  // of row m of a block in (L, S)
        return m / size * sequences.n_sequences + of_block[m % size];
    }
    INLINE float *plan(int some, Block &block, Block &beside, float *&d_inputs, Arena &arena) const {
        block = Block::plan(*layout, n_steps, some, true, arena);
        if (risk) beside = Block::plan(*risk->layout, n_steps, some, true, arena);
        d_inputs = d_x ? arena.take(size_t(n_steps) * some * padded(layout->n_inputs)) : nullptr;
        return arena.at;
    }
};

// The functions that exist once per instruction set.
struct Kernels {
    void (*pack)(const Layout &, const float *weights, const Packed &);  // backward parts too, where there is room
    void (*gather)(const Layout &, const Sequences &, const int64_t *chosen, int64_t first, Block &);
    void (*forward)(const Layout &, const Packed &, Block &);
    // Adds to `gradient` unless none, and fills `d_x` (rows, padded inputs) unless none; `added`: the gradient of what
    // the last dense layer reads has begun
    void (*backward)(const Layout &, const Packed &, Block &, bool added, const Gradient *gradient, float *d_x);
    void (*quantile_huber)(const float *quantiles, int64_t n_rows, const float *samples, int n_samples,
                           const float *levels, int n_levels, float kappa, float *loss, float *gradient);
    void (*run_shard)(ShardTask &);
};

const Kernels &kernels();  // for this processor

}  // namespace tailguard
