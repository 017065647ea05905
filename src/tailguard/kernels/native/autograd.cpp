// Trunks and the quantile loss for torch to differentiate through (kernels/networks.py).
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>

#include "trunk.h"

namespace tailguard {

namespace {

class Tape {
  public:
    Tape(nb::handle layout, ConstFloats weights, ConstFloats x, ConstBools starts, ConstFloats hidden, ConstFloats cell,
         Floats output, MaybeFloats features, int n_threads)
        : layout_(read_layout(layout, end_)) {
        expect(weights, "weights", {-1}), expect(x, "x", {-1, -1, layout_.n_inputs});
        if (int64_t(weights.shape(0)) < end_) throw std::invalid_argument("weights: fewer than the layout needs.");
        n_steps_ = int(x.shape(0)), n_sequences_ = x.shape(1);
        expect(starts, "starts", {n_steps_, n_sequences_});
        expect(hidden, "hidden", {layout_.n_layers, n_sequences_, layout_.n_units});
        expect(cell, "cell", {layout_.n_layers, n_sequences_, layout_.n_units});
        expect(output, "output", {n_steps_, n_sequences_, layout_.outputs()});
        if (features) expect(*features, "features", {n_steps_, n_sequences_, layout_.features()});
        ShardTask whole{};
        whole.n_steps = n_steps_, whole.n_chosen = (n_sequences_ + N_SHARDS - 1) / N_SHARDS;
        size_ = n_steps_ ? std::max(whole.size(), 1) : 1;
        const int64_t n_blocks = n_steps_ ? (n_sequences_ + size_ - 1) / size_ : 0;
        blocks_.resize(n_blocks), buffers_.resize(n_blocks);
        const Sequences sequences{x.data(), bytes(starts), nullptr, hidden.data(), cell.data(), n_sequences_};
        nb::gil_scoped_release released;
        packed_.load(layout_, weights.data(), true);
        parallel(int(n_blocks), n_threads, [&](int i) {
            const int64_t first = int64_t(i) * size_;
            const int some = int(std::min<int64_t>(size_, n_sequences_ - first));
            buffers_[i] = Buffer(block_size(layout_, n_steps_, some, true));
            Arena arena{buffers_[i].data()};
            blocks_[i] = Block::plan(layout_, n_steps_, some, true, arena);
            kernels().gather(layout_, sequences, nullptr, first, blocks_[i]);
            kernels().forward(layout_, packed_.packed, blocks_[i]);
            copy_rows(blocks_[i].outputs[layout_.n_dense - 1], padded(layout_.outputs()), blocks_[i], layout_.outputs(),
                      output.data(), n_sequences_, first);
            if (features)
                copy_rows(features_of(layout_, blocks_[i]), padded(layout_.features()), blocks_[i], layout_.features(),
                          features->data(), n_sequences_, first);
        });
    }

    void backward(ConstFloats d_output, MaybeConstFloats d_features, MaybeFloats gradient, MaybeFloats d_x, int n_threads) {
        if (used_) throw std::logic_error("The graph of a trunk can be walked back only once: run the sequences again.");
        used_ = true;
        expect(d_output, "d_output", {n_steps_, n_sequences_, layout_.outputs()});
        if (d_features) expect(*d_features, "d_features", {n_steps_, n_sequences_, layout_.features()});
        if (d_x) expect(*d_x, "d_x", {n_steps_, n_sequences_, layout_.n_inputs});
        if (gradient && (gradient->ndim() != 1 || int64_t(gradient->shape(0)) < end_))
            throw std::invalid_argument("gradient: fewer numbers than the layout needs.");
        std::optional<ShardGradients> sums;
        if (gradient) sums.emplace(layout_);
        nb::gil_scoped_release released;
        parallel(N_SHARDS, n_threads, [&](int shard) {
            if (sums) sums->clear(shard);
            const size_t share = (blocks_.size() + N_SHARDS - 1) / N_SHARDS;
            for (size_t i = shard * share; i < std::min((shard + 1) * share, blocks_.size()); ++i)
                backward_block(blocks_[i], int64_t(i) * size_, d_output, d_features, sums ? &sums->sums[shard] : nullptr, d_x);
        });
        if (gradient) sums->reduce(layout_, gradient->data());
        blocks_.clear(), buffers_.clear();
    }

  private:
    void backward_block(Block &block, int64_t first, const ConstFloats &d_output, const MaybeConstFloats &d_features,
                        const Gradient *gradient, const MaybeFloats &d_x) {
        const int last = layout_.n_dense - 1, width = layout_.outputs(), stride = padded(width);
        const int in_width = padded(layout_.n_inputs);
        for (int m = 0; m < block.rows(); ++m) {
            const int64_t at = m / block.size * n_sequences_ + first + m % block.size;
            float *row = block.d_outputs[last] + size_t(m) * stride;
            std::memset(row, 0, sizeof(float) * stride);
            std::memcpy(row, d_output.data() + at * width, sizeof(float) * width);
        }
        block.extra = d_features ? d_features->data() + first * layout_.features() : nullptr;
        block.extra_step = n_sequences_ * layout_.features();
        Buffer inputs(d_x ? size_t(block.rows()) * in_width : 0);
        kernels().backward(layout_, packed_.packed, block, gradient, d_x ? inputs.data() : nullptr);
        if (d_x) copy_rows(inputs.data(), in_width, block, layout_.n_inputs, d_x->data(), n_sequences_, first);
    }

    int64_t end_ = 0;
    Layout layout_;
    PackedWeights packed_;
    int n_steps_, size_;
    int64_t n_sequences_;
    std::vector<Block> blocks_;
    std::vector<Buffer> buffers_;
    bool used_ = false;
};

void quantile_huber(const ConstFloats &quantiles, const ConstFloats &samples, const ConstFloats &levels, float kappa,
                    const Floats &loss, const Floats &gradient, int n_threads) {
    const int64_t M = quantiles.ndim() == 2 ? quantiles.shape(0) : -1, Q = levels.ndim() == 1 ? levels.shape(0) : -1;
    expect(quantiles, "quantiles", {M, Q}), expect(samples, "samples", {M, -1}), expect(loss, "loss", {M});
    expect(gradient, "gradient", {M, Q});
    const int64_t K = samples.shape(1);
    if (Q > 4096 || K < 1) throw std::invalid_argument("quantile_huber: 1 to 4096 levels, at least one sample.");
    constexpr int64_t rows = 512;
    nb::gil_scoped_release released;
    parallel(int((M + rows - 1) / rows), n_threads, [&](int i) {
        const int64_t first = i * rows, some = std::min(rows, M - first);
        kernels().quantile_huber(quantiles.data() + first * Q, some, samples.data() + first * K, int(K), levels.data(),
                                 int(Q), kappa, loss.data() + first, gradient.data() + first * Q);
    });
}

}  // namespace

void bind_autograd(nb::module_ &module) {
    using nb::arg;
    nb::class_<Tape>(module, "Tape")
        .def(nb::init<nb::handle, ConstFloats, ConstFloats, ConstBools, ConstFloats, ConstFloats, Floats, MaybeFloats, int>(),
             arg("layout"), arg("weights").noconvert(), arg("x").noconvert(), arg("starts").noconvert(),
             arg("hidden").noconvert(), arg("cell").noconvert(), arg("output").noconvert(),
             arg("features").noconvert().none(), arg("n_threads"))
        .def("backward", &Tape::backward, arg("d_output").noconvert(), arg("d_features").noconvert().none(),
             arg("gradient").noconvert().none(), arg("d_x").noconvert().none(), arg("n_threads"));
    module.def("quantile_huber", &quantile_huber, arg("quantiles").noconvert(), arg("samples").noconvert(),
               arg("levels").noconvert(), arg("kappa"), arg("loss").noconvert(), arg("gradient").noconvert(),
               arg("n_threads"));
}

}  // namespace tailguard
