// Acting steps and whole rollouts through trunks, without gradient (kernels/networks.py).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "trunk.h"

namespace tailguard {

namespace {

// State of sequence i of a block after step t; hidden and cell: (layers, stride, H), written at column `at`
void copy_state(const Layout &layout, const Block &block, int t, int i, float *hidden, float *cell, int64_t stride,
                int64_t at) {
    const int units = layout.units();
    const size_t m = size_t(t) * block.size + i, H = layout.n_units;
    for (int k = 0; k < layout.n_layers; ++k) {
        const float *source = k + 1 == layout.n_layers ? block.features + m * units
                                                       : block.joined[k + 1] + m * padded(layout.columns(k + 1)) + units;
        std::memcpy(hidden + (k * stride + at) * H, source, sizeof(float) * H);
        std::memcpy(cell + (k * stride + at) * H, block.cells[k] + m * units, sizeof(float) * H);
    }
}

// Sequences in a block where rows do not depend on each other: as many as a product likes, but enough blocks for threads
int block_of(int64_t n, int n_threads) {
    if (n_threads <= 1 || n <= 16) return int(std::min<int64_t>(n, MOST_SEQUENCES));
    const int64_t share = (n + n_threads - 1) / n_threads;
    return int(std::clamp<int64_t>((share + 7) / 8 * 8, 8, MOST_SEQUENCES));
}

class Trunk {
  public:
    explicit Trunk(nb::handle layout) : layout_(read_layout(layout, end_)) {}

    void load(const ConstFloats &weights) {
        if (weights.ndim() != 1 || int64_t(weights.shape(0)) < end_)
            throw std::invalid_argument("weights: a flat vector of at least " + std::to_string(end_) + " numbers is needed.");
        weights_.load(layout_, weights.data(), false);
    }

    void step(const ConstFloats &x, const Floats &hidden, const Floats &cell, const Floats &output, int n_threads) {
        const int64_t N = x.ndim() == 2 ? x.shape(0) : -1;
        expect(x, "x", {-1, layout_.n_inputs}), expect(output, "output", {N, layout_.outputs()});
        check_state(hidden, cell, N);
        const Sequences sequences{x.data(), nullptr, nullptr, hidden.data(), cell.data(), N};
        const int size = block_of(N, n_threads), n_blocks = N ? int((N + size - 1) / size) : 0;
        auto run = [&](int i) {
            const int64_t first = int64_t(i) * size;
            const int some = int(std::min<int64_t>(size, N - first));
            Block block;
            const Buffer buffer = allocate(block, layout_, 1, some, false);
            kernels().gather(layout_, sequences, nullptr, first, block);
            kernels().forward(layout_, loaded(), block);
            for (int n = 0; n < some; ++n)
                copy_state(layout_, block, 0, n, hidden.data(), cell.data(), N, first + n);
            copy_rows(block.outputs[layout_.n_dense - 1], padded(layout_.outputs()), block, layout_.outputs(),
                      output.data(), N, first);
        };
        if (n_blocks == 1) return run(0);
        nb::gil_scoped_release released;
        parallel(n_blocks, n_threads, run);
    }

    const Packed &loaded() const {
        if (!weights_.buffer.data()) throw std::logic_error("Trunk: load(weights) comes before step and evaluate.");
        return weights_.packed;
    }

    void check_state(const Floats &hidden, const Floats &cell, int64_t N) const {
        expect(hidden, "hidden", {layout_.n_layers, N, layout_.n_units});
        expect(cell, "cell", {layout_.n_layers, N, layout_.n_units});
    }

    const Layout &layout() const { return layout_; }

  private:
    int64_t end_ = 0;
    Layout layout_;
    PackedWeights weights_;
};

// What one trunk reads and writes in evaluate()
struct Evaluation {
    const Trunk *trunk;
    ConstFloats x;                       // (T, N, F)
    Floats hidden, cell;                 // (layers, N, H) in and out
    Floats output;                       // (T, N, W)
    MaybeFloats features;                // (T, N, D)
    Floats before_hidden, before_cell;   // (S, layers, N, H)
    Floats after_hidden, after_cell;     // (layers, E, H)
};

void evaluate_block(const Evaluation &task, const ConstBools &starts, int64_t sequence_length, const ConstInts &where,
                    int64_t first, int size) {
    const int most_steps = std::clamp(256 / size, 1, 16);  // at a time: what they compute stays in the cache
    const Layout &layout = task.trunk->layout();
    const int64_t T = task.x.shape(0), N = task.x.shape(1), E = where.shape(0), H = layout.n_units;
    Block block;
    const Buffer buffer = allocate(block, layout, most_steps, size, false);
    for (int64_t begin = 0; begin < T;) {
        const int64_t s = begin / sequence_length, end = std::min({T, (s + 1) * sequence_length, begin + most_steps});
        Arena arena{buffer.data()};
        block = Block::plan(layout, int(end - begin), size, false, arena);
        Sequences sequences{task.x.data(), bytes(starts), nullptr, task.hidden.data(), task.cell.data(), N};
        sequences = sequences.from(begin, layout.n_inputs);
        if (begin == s * sequence_length)
            for (int k = 0; k < layout.n_layers; ++k)
                for (int64_t n = first; n < first + size; ++n) {
                    const size_t from = (k * N + n) * H, to = ((s * layout.n_layers + k) * N + n) * H;
                    for (int64_t j = 0; j < H; ++j) {
                        task.before_hidden.data()[to + j] = sequences.starts[n] ? 0.0f : task.hidden.data()[from + j];
                        task.before_cell.data()[to + j] = sequences.starts[n] ? 0.0f : task.cell.data()[from + j];
                    }
                }
        kernels().gather(layout, sequences, nullptr, first, block);
        kernels().forward(layout, task.trunk->loaded(), block);
        for (int i = 0; i < size; ++i)
            copy_state(layout, block, block.n_steps - 1, i, task.hidden.data(), task.cell.data(), N, first + i);
        for (int64_t e = 0; e < E; ++e) {
            const int64_t t = where.data()[2 * e], n = where.data()[2 * e + 1];
            if (t >= begin && t < end && n >= first && n < first + size)
                copy_state(layout, block, int(t - begin), int(n - first), task.after_hidden.data(),
                           task.after_cell.data(), E, e);
        }
        const int width = layout.outputs(), n_features = layout.features();
        copy_rows(block.outputs[layout.n_dense - 1], padded(width), block, width,
                  task.output.data() + begin * N * width, N, first);
        if (task.features)
            copy_rows(features_of(layout, block), padded(n_features), block, n_features,
                      task.features->data() + begin * N * n_features, N, first);
        begin = end;
    }
}

void evaluate(const std::vector<const Trunk *> &trunks, const std::vector<nb::tuple> &arrays, const ConstBools &starts,
              int64_t sequence_length, const ConstInts &where, int n_threads) {
    if (starts.ndim() != 2 || arrays.size() != trunks.size() || sequence_length < 1)
        throw std::invalid_argument("evaluate: starts are (T, N), and every trunk has its arrays.");
    const int64_t T = starts.shape(0), N = starts.shape(1), E = where.shape(0), S = (T + sequence_length - 1) / sequence_length;
    expect(where, "where", {-1, 2});
    for (int64_t e = 0; e < E; ++e)
        if (where.data()[2 * e] < 0 || where.data()[2 * e] >= T || where.data()[2 * e + 1] < 0 || where.data()[2 * e + 1] >= N)
            throw std::invalid_argument("where: steps and environments lie in the rollout.");
    std::vector<Evaluation> tasks;
    for (size_t k = 0; k < trunks.size(); ++k) {
        const Layout &layout = trunks[k]->layout();
        const nb::tuple &a = arrays[k];
        auto floats = [&](int i) { return nb::cast<Floats>(a[i]); };
        Evaluation task{trunks[k], nb::cast<ConstFloats>(a[0]), floats(1), floats(2), floats(3),
                        nb::cast<MaybeFloats>(a[4]), floats(5), floats(6), floats(7), floats(8)};
        const int64_t layers = layout.n_layers, H = layout.n_units;
        expect(task.x, "x", {T, N, layout.n_inputs}), expect(task.output, "output", {T, N, layout.outputs()});
        trunks[k]->check_state(task.hidden, task.cell, N), trunks[k]->loaded();
        if (task.features) expect(*task.features, "features", {T, N, layout.features()});
        expect(task.before_hidden, "before_hidden", {S, layers, N, H}), expect(task.before_cell, "before_cell", {S, layers, N, H});
        expect(task.after_hidden, "after_hidden", {layers, E, H}), expect(task.after_cell, "after_cell", {layers, E, H});
        tasks.push_back(std::move(task));
    }
    const int size = block_of(N, n_threads), n_blocks = N ? int((N + size - 1) / size) : 0;
    nb::gil_scoped_release released;
    parallel(int(tasks.size()) * n_blocks, n_threads, [&](int i) {
        const int64_t first = int64_t(i % n_blocks) * size;
        evaluate_block(tasks[i / n_blocks], starts, sequence_length, where, first,
                       int(std::min<int64_t>(size, N - first)));
    });
}

}  // namespace

void bind_acting(nb::module_ &module) {
    using nb::arg;
    nb::class_<Trunk>(module, "Trunk")
        .def(nb::init<nb::handle>(), arg("layout"))
        .def("load", &Trunk::load, arg("weights").noconvert())
        .def("step", &Trunk::step, arg("x").noconvert(), arg("hidden").noconvert(), arg("cell").noconvert(),
             arg("output").noconvert(), arg("n_threads") = 1);
    module.def("evaluate", &evaluate, arg("trunks"), arg("arrays"), arg("starts").noconvert(), arg("sequence_length"),
               arg("where").noconvert(), arg("n_threads"));
}

}  // namespace tailguard
