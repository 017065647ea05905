// Matrix products in tiles that stay in registers. Included by files that are compiled per instruction set.
//
// Every element of a product is one sum in the order of the inner index, so no bit depends on a tile's place or height.
#pragma once

#include "vectors.h"

namespace tailguard {
namespace LEVEL {

struct Left {  // (M, depth): rows of contiguous numbers, or, transposed, columns of them
    const float *at;
    ptrdiff_t stride;
    bool transposed;
};

struct Right {  // (depth, N) in panels
    const float *at;
    ptrdiff_t row, panel;  // from one row to the next, and from one panel to the next
};

// `rows` rows and `panels` panels of a product, whose sums begin with `start` (or zero)
template <int ROWS, int PANELS, bool TRANSPOSED>
static void tile(const float *a, ptrdiff_t stride, const float *b, ptrdiff_t row, ptrdiff_t panel, float *c,
                 ptrdiff_t c_row, int depth, const float *start, ptrdiff_t start_row) {
    constexpr int N = PANELS * VECTORS;
    vec sums[ROWS][N];
    if (start) {
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 16
            for (int j = 0; j < N; ++j) sums[i][j] = load(start + i * start_row + j * LANES);
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 16
            for (int j = 0; j < N; ++j) sums[i][j] = vec{};
    }
    for (int k = 0; k < depth; ++k) {
        vec factors[N];
#pragma GCC unroll 16
        for (int j = 0; j < N; ++j) factors[j] = load(b + j / VECTORS * panel + j % VECTORS * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            const float x = TRANSPOSED ? a[i] : a[i * stride];
#pragma GCC unroll 16
            for (int j = 0; j < N; ++j) sums[i][j] += x * factors[j];
        }
        a += TRANSPOSED ? stride : 1;
        b += row;
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < N; ++j) store(c + i * c_row + j * LANES, sums[i][j]);
}

using Tile = void (*)(const float *, ptrdiff_t, const float *, ptrdiff_t, ptrdiff_t, float *, ptrdiff_t, int,
                      const float *, ptrdiff_t);

template <int PANELS, bool TRANSPOSED>
static inline Tile tile_of(int rows) {
#define TAILGUARD_TILE(n) tile<(n <= MOST_ROWS ? n : MOST_ROWS), PANELS, TRANSPOSED>
    static const Tile tiles[] = {TAILGUARD_TILE(1), TAILGUARD_TILE(2), TAILGUARD_TILE(3),  TAILGUARD_TILE(4),
                                 TAILGUARD_TILE(5), TAILGUARD_TILE(6), TAILGUARD_TILE(7),  TAILGUARD_TILE(8),
                                 TAILGUARD_TILE(9), TAILGUARD_TILE(10), TAILGUARD_TILE(11), TAILGUARD_TILE(12)};
#undef TAILGUARD_TILE
    return tiles[rows - 1];
}

// C (M, N) = start + A (M, depth) B (depth, N); N in whole panels. start_row 0 adds one row to all; start == c adds up.
static void product(Left a, Right b, float *c, ptrdiff_t c_row, int M, int N, int depth, const float *start,
                    ptrdiff_t start_row) {
    constexpr int MOST_DEPTH = 512;
    for (int k = 0; k < depth || k == 0; k += MOST_DEPTH) {
        const int some = depth - k < MOST_DEPTH ? depth - k : MOST_DEPTH;
        for (int p = 0; p < N / PANEL;) {
            const int panels = N / PANEL - p >= MOST_PANELS ? MOST_PANELS : 1;
            const float *right = b.at + p * b.panel + k * b.row;
            for (int i = 0, n_tiles = (M + MOST_ROWS - 1) / MOST_ROWS; n_tiles > 0; --n_tiles) {
                const int rows = (M - i) / n_tiles;  // nearly the same for all: none is left with a row or two
                const float *left = a.at + (a.transposed ? i + k * a.stride : i * a.stride + k);
                const Tile run = a.transposed ? (panels == 1 ? tile_of<1, true>(rows) : tile_of<MOST_PANELS, true>(rows))
                                              : (panels == 1 ? tile_of<1, false>(rows) : tile_of<MOST_PANELS, false>(rows));
                float *result = c + i * c_row + p * PANEL;
                run(left, a.stride, right, b.row, b.panel, result, c_row, some,
                    start ? start + i * start_row + p * PANEL : nullptr, start_row);
                i += rows;
            }
            p += panels;
        }
        start = c, start_row = c_row;
    }
}

}  // namespace LEVEL
}  // namespace tailguard
