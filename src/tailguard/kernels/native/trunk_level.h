// Functions of networks_level.cpp that losses_level.cpp calls, per instruction set.
#pragma once

#include "vectors.h"

namespace tailguard {
namespace LEVEL {

void pack(const Layout &layout, const float *weights, const Packed &packed);
void gather(const Layout &layout, const Sequences &sequences, const int64_t *chosen, int64_t first, Block &block);
void forward(const Layout &layout, const Packed &packed, Block &block);
void dense_forward(const Layout &layout, const Packed &packed, const float *x, int x_stride, int rows,
                   float *const *outputs);
void backward(const Layout &layout, const Packed &packed, Block &block, bool added, const Gradient *gradient, float *d_x);
void dense_backward(const Layout &layout, const Packed &packed, const float *x, int x_stride, int rows,
                    float *const *outputs, float *const *d_outputs, float *d_x, bool added, const Gradient *gradient);

}  // namespace LEVEL
}  // namespace tailguard
