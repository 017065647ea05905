#include "trunk.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>

namespace tailguard {

Layout read_layout(nb::handle source, int64_t &end) {
    Layout layout;
    layout.n_inputs = nb::cast<int>(source.attr("n_inputs"));
    layout.n_units = nb::cast<int>(source.attr("n_units"));
    const auto activation = nb::cast<std::string>(source.attr("activation"));
    if (activation != "tanh" && activation != "relu")
        throw std::invalid_argument("activation '" + activation + "' is unknown: use tanh or relu.");
    layout.relu = activation == "relu";
    const auto recurrent = nb::cast<nb::tuple>(source.attr("recurrent")), dense = nb::cast<nb::tuple>(source.attr("dense"));
    if (recurrent.size() > MOST_LAYERS || dense.size() > MOST_LAYERS || dense.size() == 0)
        throw std::invalid_argument("a trunk has 0 to 16 recurrent and 1 to 16 dense layers.");
    layout.n_layers = int(recurrent.size()), layout.n_dense = int(dense.size());
    if (layout.n_layers == 0) layout.n_units = 0;
    if (layout.n_inputs < 1 || (layout.n_layers && layout.n_units < 1))
        throw std::invalid_argument("a trunk has at least one input, and recurrent layers at least one unit.");
    end = 0;
    auto offset = [&](nb::handle value, int64_t count) {
        const auto at = nb::cast<int64_t>(value);
        if (at < 0) throw std::invalid_argument("offsets of weights are not negative.");
        end = std::max(end, at + count);
        return at;
    };
    const int64_t H = layout.n_units;
    for (int k = 0; k < layout.n_layers; ++k) {
        const auto row = nb::cast<nb::tuple>(recurrent[k]);
        layout.recurrent[k] = {offset(row[0], 4 * H * (k == 0 ? layout.n_inputs : H)), offset(row[1], 4 * H * H),
                               offset(row[2], 4 * H)};
    }
    int inputs = layout.n_layers ? layout.n_units : layout.n_inputs;
    for (int k = 0; k < layout.n_dense; ++k) {
        const auto row = nb::cast<nb::tuple>(dense[k]);
        Dense &layer = layout.dense[k];
        layer.outputs = nb::cast<int>(row[2]), layer.inputs = nb::cast<int>(row[3]);
        if (layer.inputs != inputs || layer.outputs < 1)
            throw std::invalid_argument("dense layer " + std::to_string(k) + " reads " + std::to_string(layer.inputs) +
                                        " numbers, the one before it gives " + std::to_string(inputs) + ".");
        layer.weight = offset(row[0], int64_t(layer.outputs) * layer.inputs), layer.bias = offset(row[1], layer.outputs);
        inputs = layer.outputs;
    }
    return layout;
}

void copy_rows(const float *source, int stride, const Block &block, int width, float *result, int64_t S, int64_t first) {
    for (int t = 0; t < block.n_steps; ++t)
        for (int i = 0; i < block.size; ++i)
            std::memcpy(result + (t * S + first + i) * width, source + (size_t(t) * block.size + i) * stride,
                        sizeof(float) * width);
}

void reduce(const Layout &layout, const Gradient &a, const Gradient &b, float *gradient) {
    auto add = [](const float *x, const float *y, int64_t count, float *result) {
        for (int64_t j = 0; j < count; ++j) result[j] = x[j] + y[j];
    };
    const int64_t H = layout.n_units, units = layout.units();
    for (int k = 0; k < layout.n_layers; ++k) {
        const int64_t n_inputs = k == 0 ? layout.n_inputs : H, columns = layout.columns(k), stride = padded(int(columns));
        for (int64_t gate = 0; gate < 4; ++gate)
            for (int64_t r = 0; r < H; ++r) {
                const float *x = a.recurrent[k] + (gate * units + r) * stride;
                const float *y = b.recurrent[k] + (gate * units + r) * stride;
                const int64_t row = gate * H + r;
                add(x, y, H, gradient + layout.recurrent[k].hidden_weight + row * H);
                add(x + units, y + units, n_inputs, gradient + layout.recurrent[k].input_weight + row * n_inputs);
                add(x + columns - 1, y + columns - 1, 1, gradient + layout.recurrent[k].bias + row);
            }
    }
    for (int k = 0; k < layout.n_dense; ++k) {
        const Dense &dense = layout.dense[k];
        const int64_t stride = padded(dense.inputs);
        for (int64_t r = 0; r < dense.outputs; ++r)
            add(a.dense[k] + r * stride, b.dense[k] + r * stride, dense.inputs, gradient + dense.weight + r * dense.inputs);
        add(a.bias[k], b.bias[k], dense.outputs, gradient + dense.bias);
    }
}

}  // namespace tailguard
