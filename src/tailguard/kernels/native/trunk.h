// What acting, evaluation and gradients share: layouts, packed weights, blocks, sums of gradients.
#pragma once

#include <optional>

#include "arrays.h"
#include "networks.h"
#include "pool.h"

namespace tailguard {

using Floats = Array<float>;
using ConstFloats = Array<const float>;
using ConstBools = Array<const bool>;
using ConstInts = Array<const int64_t>;
using MaybeFloats = std::optional<Floats>;
using MaybeConstFloats = std::optional<ConstFloats>;

inline const uint8_t *bytes(const ConstBools &array) { return reinterpret_cast<const uint8_t *>(array.data()); }

// Reads a TrunkLayout; `end` becomes what the flat vector of weights must at least hold
Layout read_layout(nb::handle source, int64_t &end);

// Room for a Packed, Gradient or Block, which is laid out in it
template <typename Plan, typename... Arguments>
Buffer allocate(Plan &plan, const Arguments &...arguments) {
    Arena size;
    Plan::plan(arguments..., size);
    Buffer buffer(size.used);
    Arena arena{buffer.data()};
    plan = Plan::plan(arguments..., arena);
    return buffer;
}

// A copy of a trunk's weights as the products read them
struct PackedWeights {
    Buffer buffer;
    Packed packed{};

    void load(const Layout &layout, const float *weights, bool with_backward) {
        if (!buffer.data()) buffer = allocate(packed, layout, with_backward);
        kernels().pack(layout, weights, packed);
    }
};

// Copies the first `width` columns of a block's rows (L, b) to columns first .. of an array (L, S, width)
void copy_rows(const float *source, int stride, const Block &block, int width, float *result, int64_t S, int64_t first);

// What the last dense layer read, rows padded to whole panels
inline const float *features_of(const Layout &layout, const Block &block) {
    return layout.n_dense > 1 ? block.outputs[layout.n_dense - 2] : block.features;
}

// Sum of the shards' gradients at a layout's own places
void reduce(const Layout &layout, const Gradient &a, const Gradient &b, float *gradient);

}  // namespace tailguard
