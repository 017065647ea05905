// A trunk forward and backward: recurrent layers, then dense ones. Compiled once per instruction set.
#include <cmath>
#include <cstring>

#include "products.h"
#include "trunk_level.h"

namespace tailguard {
namespace LEVEL {

// Weights in panels

// (n_rows, n_columns) rows of `source` become columns first .. first + n_rows of panels of that depth
static void pack_transposed(const float *source, int n_rows, int n_columns, float *panels, int depth, int first, int row) {
    for (int r0 = 0; r0 < n_rows; r0 += PANEL) {
        const int r1 = r0 + PANEL < n_rows ? r0 + PANEL : n_rows;
        float *panel = panels + size_t(first + r0) * depth + size_t(row) * PANEL;
        for (int c0 = 0; c0 < n_columns; c0 += PANEL) {
            const int c1 = c0 + PANEL < n_columns ? c0 + PANEL : n_columns;
            for (int r = r0; r < r1; ++r)
                for (int c = c0; c < c1; ++c) panel[c * PANEL + r - r0] = source[size_t(r) * n_columns + c];
        }
    }
}

// (n_rows, n_columns) becomes rows first .. first + n_rows of panels of that depth
static void pack_rows(const float *source, int n_rows, int n_columns, float *panels, int depth, int first) {
    for (int c0 = 0; c0 < n_columns; c0 += PANEL) {
        const int width = n_columns - c0 < PANEL ? n_columns - c0 : PANEL;
        float *panel = panels + size_t(c0) * depth + size_t(first) * PANEL;
        for (int r = 0; r < n_rows; ++r) std::memcpy(panel + r * PANEL, source + size_t(r) * n_columns + c0, 4 * width);
    }
}

void pack(const Layout &layout, const float *weights, const Packed &packed) {
    const int H = layout.n_units, units = layout.units(), gates = layout.gates();
    for (int k = 0; k < layout.n_layers; ++k) {
        const Recurrent &recurrent = layout.recurrent[k];
        const int columns = layout.columns(k), n_inputs = k == 0 ? layout.n_inputs : H, block = layout.inputs_of(k);
        const bool backward = packed.hidden_back[k] != nullptr;
        if (units != H) {
            std::memset(packed.recurrent[k], 0, sizeof(float) * gates * columns);
            if (backward) std::memset(packed.hidden_back[k], 0, sizeof(float) * gates * units);
        }
        if (backward && (units != H || n_inputs % PANEL))
            std::memset(packed.input_back[k], 0, sizeof(float) * gates * padded(block));
        for (int gate = 0; gate < 4; ++gate) {
            const float *hidden = weights + recurrent.hidden_weight + size_t(gate) * H * H;
            const float *input = weights + recurrent.input_weight + size_t(gate) * H * n_inputs;
            const float *bias = weights + recurrent.bias + size_t(gate) * H;
            pack_transposed(hidden, H, H, packed.recurrent[k], columns, gate * units, 0);
            pack_transposed(input, H, n_inputs, packed.recurrent[k], columns, gate * units, units);
            pack_transposed(bias, H, 1, packed.recurrent[k], columns, gate * units, columns - 1);
            if (!backward) continue;
            pack_rows(hidden, H, H, packed.hidden_back[k], gates, gate * units);
            pack_rows(input, H, n_inputs, packed.input_back[k], gates, gate * units);
        }
    }
    for (int k = 0; k < layout.n_dense; ++k) {
        const Dense &dense = layout.dense[k];
        const float *weight = weights + dense.weight;
        if (dense.outputs % PANEL)
            std::memset(packed.dense[k], 0, sizeof(float) * padded(dense.outputs) * dense.inputs);
        pack_transposed(weight, dense.outputs, dense.inputs, packed.dense[k], dense.inputs, 0, 0);
        std::memset(packed.bias[k], 0, sizeof(float) * padded(dense.outputs));
        std::memcpy(packed.bias[k], weights + dense.bias, sizeof(float) * dense.outputs);
        if (!packed.dense_back[k]) continue;
        if (dense.inputs % PANEL)
            std::memset(packed.dense_back[k], 0, sizeof(float) * padded(dense.inputs) * dense.outputs);
        pack_rows(weight, dense.outputs, dense.inputs, packed.dense_back[k], dense.outputs, 0);
    }
}

// Inputs

// `count` numbers and zeros up to `width`; numbers that are not trusted and not finite are zero too
static void copy_padded(const float *source, int count, bool trusted, float *result, int width) {
    if (trusted) std::memcpy(result, source, sizeof(float) * count);
    for (int j = 0; !trusted && j < count; ++j) result[j] = std::isfinite(source[j]) ? source[j] : 0.0f;
    for (int j = count; j < width; ++j) result[j] = 0.0f;
}

void gather(const Layout &layout, const Sequences &sequences, const int64_t *chosen, int64_t first, Block &block) {
    const int F = layout.n_inputs, H = layout.n_units, units = layout.units(), size = block.size;
    for (int k = 0; k < layout.n_layers; ++k) {
        const int columns = layout.columns(k), stride = padded(columns);
        for (int i = 0; i < size; ++i) {
            const int64_t s = chosen ? chosen[first + i] : first + i;
            const bool trusted = !sequences.valid || sequences.valid[s];
            const bool starts = sequences.starts && sequences.starts[s];
            const size_t from = (k * sequences.n_sequences + s) * H;
            float *hidden = block.joined[k] + size_t(i) * stride, *cell = block.first_cell[k] + size_t(i) * units;
            copy_padded(sequences.hidden + from, starts ? 0 : H, trusted, hidden, units);
            copy_padded(sequences.cell + from, starts ? 0 : H, trusted, cell, units);
        }
        for (int m = 0; m < block.rows(); ++m) {
            float *rest = block.joined[k] + size_t(m) * stride + columns - 1;
            rest[0] = 1.0f;
            for (int j = 1; j <= stride - columns; ++j) rest[j] = 0.0f;
        }
    }
    const int stride = layout.n_layers ? padded(layout.columns(0)) : padded(F);
    for (int t = 0; t < block.n_steps; ++t)
        for (int i = 0; i < size; ++i) {
            const int64_t s = chosen ? chosen[first + i] : first + i, at = t * sequences.n_sequences + s;
            const size_t m = size_t(t) * size + i;
            float *row = layout.n_layers ? block.joined[0] + m * stride + units : block.features + m * stride;
            block.kept[m] = sequences.starts && sequences.starts[at] ? 0.0f : 1.0f;
            copy_padded(sequences.x + at * F, F, !sequences.valid || sequences.valid[at], row,
                        layout.n_layers ? F : stride);
        }
}

// Forward

// One step of one sequence: gate inputs become gates; `next` is what the next step reads, if there is one
static inline void cell_forward(int units, float *gates, const float *past, float *cell, float *squashed, float *hidden,
                                float *next, bool kept_next) {
    for (int j = 0; j < units; j += LANES) {
        const vec entry = sigmoid(load(gates + j)), forget = sigmoid(load(gates + units + j));
        const vec candidate = tanh(load(gates + 2 * units + j)), output = sigmoid(load(gates + 3 * units + j));
        vec state = entry * candidate;
        if (past) state = forget * load(past + j) + state;
        const vec squash = tanh(state), result = output * squash;
        store(gates + j, entry), store(gates + units + j, forget);
        store(gates + 2 * units + j, candidate), store(gates + 3 * units + j, output);
        store(cell + j, state), store(squashed + j, squash), store(hidden + j, result);
        if (next) store(next + j, kept_next ? result : vec{});
    }
}

static void recurrent_forward(const Layout &layout, const Packed &packed, Block &block, int k) {
    const int units = layout.units(), columns = layout.columns(k), stride = padded(columns), size = block.size;
    const bool top = k + 1 == layout.n_layers;
    const int hidden_stride = top ? units : padded(layout.columns(k + 1));
    float *hidden = top ? block.features : block.joined[k + 1] + units;
    const Right weight{packed.recurrent[k], PANEL, ptrdiff_t(columns) * PANEL};
    for (int t = 0; t < block.n_steps; ++t) {
        const size_t row = size_t(t) * size;
        float *joined = block.joined[k] + row * stride, *gates = block.gates[k] + row * layout.gate_stride();
        product({joined, stride, false}, weight, gates, layout.gate_stride(), size, layout.gates(), columns, nullptr, 0);
        for (int i = 0; i < size; ++i) {
            const size_t m = row + i;
            const float *past = t == 0 ? block.first_cell[k] + size_t(i) * units
                                : block.kept[m] != 0.0f ? block.cells[k] + (m - size) * units : nullptr;
            float *next = t + 1 < block.n_steps ? joined + (size_t(size) + i) * stride : nullptr;
            cell_forward(units, gates + size_t(i) * layout.gate_stride(), past, block.cells[k] + m * units,
                         block.squashed[k] + m * units, hidden + m * hidden_stride, next,
                         next && block.kept[m + size] != 0.0f);
        }
    }
}

void dense_forward(const Layout &layout, const Packed &packed, const float *x, int x_stride, int rows,
                   float *const *outputs) {
    for (int k = 0; k < layout.n_dense; ++k) {
        const Dense &dense = layout.dense[k];
        const int width = padded(dense.outputs);
        float *out = outputs[k];
        const Right weight{packed.dense[k], PANEL, ptrdiff_t(dense.inputs) * PANEL};
        product({x, x_stride, false}, weight, out, width, rows, width, dense.inputs, packed.bias[k], 0);
        if (k + 1 < layout.n_dense)
            for (size_t j = 0; j < size_t(rows) * width; j += LANES) {
                const vec value = load(out + j);
                store(out + j, layout.relu ? (value < 0.0f ? vec{} : value) : tanh(value));
            }
        x = out, x_stride = width;
    }
}

void forward(const Layout &layout, const Packed &packed, Block &block) {
    for (int k = 0; k < layout.n_layers; ++k) recurrent_forward(layout, packed, block, k);
    const int width = layout.n_layers ? layout.units() : padded(layout.n_inputs);
    dense_forward(layout, packed, block.features, width, block.rows(), block.outputs);
}

// Backward

// `added`: the gradient of what the last layer reads has begun already, and its sum goes on
void dense_backward(const Layout &layout, const Packed &packed, const float *x, int x_stride, int rows,
                    float *const *outputs, float *const *d_outputs, float *d_x, bool added, const Gradient *gradient) {
    for (int k = layout.n_dense - 1; k >= 0; --k) {
        const Dense &dense = layout.dense[k];
        const int width = padded(dense.outputs), in_width = padded(dense.inputs);
        float *d_out = d_outputs[k];
        if (k + 1 < layout.n_dense)
            for (size_t j = 0; j < size_t(rows) * width; j += LANES) {
                const vec out = load(outputs[k] + j), d = load(d_out + j);
                store(d_out + j, layout.relu ? (out > 0.0f ? d : vec{}) : d * (1.0f - out * out));
            }
        const float *entry = k > 0 ? outputs[k - 1] : x;
        const int entry_stride = k > 0 ? padded(layout.dense[k - 1].outputs) : x_stride;
        if (gradient) {
            for (int j = 0; j < width; j += LANES) {
                vec sum = load(gradient->bias[k] + j);
                for (int m = 0; m < rows;) {
                    vec some = {};  // sums of sums: one after the other, thousands of rows would lose digits
                    for (const int end = m + 64 < rows ? m + 64 : rows; m < end; ++m)
                        some += load(d_out + size_t(m) * width + j);
                    sum += some;
                }
                store(gradient->bias[k] + j, sum);
            }
            product({d_out, width, true}, {entry, entry_stride, PANEL}, gradient->dense[k], in_width, dense.outputs,
                    in_width, rows, gradient->dense[k], in_width);
        }
        float *d_entry = k > 0 ? d_outputs[k - 1] : d_x;
        if (d_entry)
            product({d_out, width, false}, {packed.dense_back[k], PANEL, ptrdiff_t(dense.outputs) * PANEL}, d_entry,
                    in_width, rows, in_width, dense.outputs, added && k + 1 == layout.n_dense ? d_entry : nullptr, in_width);
    }
}

// One step of one sequence: gates become the gradients of their inputs, d_cell that of the cell one step back.
// d_later: gradient of the hidden state from the step after this one, if it belongs to the same episode
static inline void cell_backward(int units, float *gates, const float *past, const float *squashed,
                                 const float *d_hidden, const float *d_later, float *d_cell) {
    for (int j = 0; j < units; j += LANES) {
        const vec entry = load(gates + j), forget = load(gates + units + j);
        const vec candidate = load(gates + 2 * units + j), output = load(gates + 3 * units + j);
        const vec squash = load(squashed + j);
        vec d_out = load(d_hidden + j);
        if (d_later) d_out += load(d_later + j);
        const vec d = load(d_cell + j) + d_out * output * (1.0f - squash * squash);
        store(gates + j, d * candidate * entry * (1.0f - entry));
        store(gates + units + j, past ? d * load(past + j) * forget * (1.0f - forget) : vec{});
        store(gates + 2 * units + j, d * entry * (1.0f - candidate * candidate));
        store(gates + 3 * units + j, d_out * squash * output * (1.0f - output));
        store(d_cell + j, past ? d * forget : vec{});
    }
}

static void recurrent_backward(const Layout &layout, const Packed &packed, Block &block, int k) {
    const int units = layout.units(), size = block.size, stride = layout.gate_stride();
    const Right weight{packed.hidden_back[k], PANEL, ptrdiff_t(layout.gates()) * PANEL};
    std::memset(block.d_cell, 0, sizeof(float) * size * units);
    for (int t = block.n_steps - 1; t >= 0; --t) {
        const size_t row = size_t(t) * size;
        for (int i = 0; i < size; ++i) {
            const size_t m = row + i;
            const float *past = block.kept[m] == 0.0f ? nullptr
                                : t == 0 ? block.first_cell[k] + size_t(i) * units : block.cells[k] + (m - size) * units;
            const bool later = t + 1 < block.n_steps && block.kept[m + size] != 0.0f;
            cell_backward(units, block.gates[k] + m * stride, past, block.squashed[k] + m * units,
                          block.d_features + m * units, later ? block.d_hidden + size_t(i) * units : nullptr,
                          block.d_cell + size_t(i) * units);
        }
        if (t > 0)
            product({block.gates[k] + row * stride, stride, false}, weight, block.d_hidden, units, size, units,
                    layout.gates(), nullptr, 0);
    }
}

void backward(const Layout &layout, const Packed &packed, Block &block, bool added, const Gradient *gradient, float *d_x) {
    const int rows = block.rows(), units = layout.units(), gates = layout.gates();
    const int width = layout.n_layers ? units : padded(layout.n_inputs);
    dense_backward(layout, packed, block.features, width, rows, block.outputs, block.d_outputs,
                   layout.n_layers ? block.d_features : d_x, added, gradient);
    for (int k = layout.n_layers - 1; k >= 0; --k) {
        recurrent_backward(layout, packed, block, k);
        const int stride = padded(layout.columns(k)), in_width = padded(layout.inputs_of(k));
        if (gradient)
            product({block.gates[k], layout.gate_stride(), true}, {block.joined[k], stride, PANEL},
                    gradient->recurrent[k], stride, gates, stride, rows, gradient->recurrent[k], stride);
        float *d_below = k > 0 ? block.d_features : d_x;
        if (d_below)
            product({block.gates[k], layout.gate_stride(), false},
                    {packed.input_back[k], PANEL, ptrdiff_t(gates) * PANEL}, d_below, in_width, rows, in_width, gates,
                    nullptr, 0);
    }
}

}  // namespace LEVEL
}  // namespace tailguard
