"""Fused CPU kernels in float32: what the torch path does in a dozen passes over memory, in two.

Blocks keep every array of a pass in the first-level cache. Loops are short and separate because LLVM gives up on
vectorizing a loop over many arrays that might overlap. Accumulators have one lane per block element: sums are exact
enough in float32, vectorize without fastmath, and do not depend on the machine's vector width. Sums in any order would
be faster, but their last bits would depend on where the arrays lie: then no run could be repeated.

Averages take keep = 1 - beta, computed in double: 1 - float32(0.999) is off by 1e-5. Numbers come as one float32 array
per kernel, which costs a call less than as many arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from tailguard.loops import compiled, emitted, wide_vectors

Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 1024
CHUNK = 64 * BLOCK  # elements whose sum stays in single precision
SHARE = 8 * BLOCK  # elements whose gates' sum does; several workers move so many at a time (optim/strides.py)
ZERO, ONE = np.float32(0.0), np.float32(1.0)
TWO = np.float32(2.0)
FLAT_TAIL = np.float32(-20.0)  # below it exp(x) is lost beside 1 in float32
SIXTEENTH = np.float32(1 / 16)
C2, C3, C4, C5, C6, C7 = (np.float32(1 / k) for k in (2, 6, 24, 120, 720, 5040))


@compiled
def _gate(x):  # type: ignore[no-untyped-def]
    """2 (1 - sigmoid(x)) for x <= 1, to 1e-6: exp by a polynomial of x/16 and four squarings; exactly 1 at x = 0."""
    y = (x if x > FLAT_TAIL else FLAT_TAIL) * SIXTEENTH
    e = ONE + y * (ONE + y * (C2 + y * (C3 + y * (C4 + y * (C5 + y * (C6 + y * C7))))))
    e = e * e
    e = e * e
    e = e * e
    e = e * e
    return TWO / (ONE + e)


@compiled
def _track_utility(w, g, u, keep, low, high):  # type: ignore[no-untyped-def]
    for j in range(w.size):
        u[j] = u[j] - keep * (g[j] * w[j] + u[j])
    for j in range(w.size):
        high[j] = u[j] if u[j] > high[j] else high[j]
    for j in range(w.size):
        low[j] = u[j] if u[j] < low[j] else low[j]


@compiled
def _track_moments(w, g, m, v, keep1, keep2, l2):  # type: ignore[no-untyped-def]
    for j in range(w.size):
        m[j] = m[j] + keep1 * (g[j] + l2 * w[j] - m[j])
    for j in range(w.size):
        d = g[j] + l2 * w[j]
        v[j] = v[j] + keep2 * (d * d - v[j])


@compiled
def _find_gate(u, centre, width, gate, total):  # type: ignore[no-untyped-def]
    for j in range(u.size):
        gate[j] = _gate((u[j] - centre) / width)
    for j in range(u.size):
        total[j] += gate[j]


@compiled
def _move(w, d, gate, noise, rate, decay, sigma, protect_weights):  # type: ignore[no-untyped-def]
    if protect_weights:
        for j in range(w.size):
            w[j] = decay * w[j] - rate * (gate[j] * (d[j] + sigma * noise[j]))
    else:
        for j in range(w.size):
            w[j] = decay * w[j] - rate * (d[j] + gate[j] * (sigma * noise[j]))


@compiled
def _sum(lanes):  # type: ignore[no-untyped-def]
    """Sum by folding the upper half onto the lower: vectorizes, where adding one by one waits for each addition."""
    size = lanes.size
    while size > 1:
        half = (size + 1) // 2
        a, b = lanes[: size - half], lanes[half:size]
        for j in range(a.size):
            a[j] += b[j]
        size = half
    return float(lanes[0])


@compiled
def _extremes(low, high):  # type: ignore[no-untyped-def]
    """(min of low, max of high), folded like the sum."""
    size = low.size
    while size > 1:
        half = (size + 1) // 2
        a, b = low[: size - half], low[half:size]
        for j in range(a.size):
            a[j] = b[j] if b[j] < a[j] else a[j]
        c, d = high[: size - half], high[half:size]
        for j in range(c.size):
            c[j] = d[j] if d[j] > c[j] else c[j]
        size = half
    return float(low[0]), float(high[0])


@compiled
def _no_extremes(n):  # type: ignore[no-untyped-def]
    """(low, high) before anything was seen, one lane per element of a block."""
    lanes = max(1, min(BLOCK, n))
    return np.full(lanes, np.inf, np.float32), np.full(lanes, -np.inf, np.float32)


@compiled
def track_utility(w, g, u, keep):  # type: ignore[no-untyped-def]
    """Update the utility average u in place; returns its (min, max)."""
    wide_vectors()
    n = w.size
    low, high = _no_extremes(n)
    for i in range(0, n, BLOCK):
        e = min(n, i + BLOCK)
        _track_utility(w[i:e], g[i:e], u[i:e], keep, low, high)
    return _extremes(low, high)


@compiled
def track_utility_and_moments(w, g, u, m, v, clip, numbers):  # type: ignore[no-untyped-def]
    """Update the utility average u and Adam's moments m, v in place by `clip` times the gradient; returns
    (min u, max u).

    numbers: what the averages keep of the newest utility, gradient and square, and the weight decay in the gradient
    """
    wide_vectors()
    keep, keep1, keep2, l2 = numbers
    n = w.size
    low, high = _no_extremes(n)
    clipped = np.empty(BLOCK, np.float32)
    for i in range(0, n, BLOCK):
        e = min(n, i + BLOCK)
        _clip(g[i:e], clip, clipped)
        _track_utility(w[i:e], clipped, u[i:e], keep, low, high)
        _track_moments(w[i:e], clipped, m[i:e], v[i:e], keep1, keep2, l2)
    return _extremes(low, high)


@compiled
def _clip(g, clip, clipped):  # type: ignore[no-untyped-def]
    for j in range(g.size):
        clipped[j] = clip * g[j]


@compiled
def move_along_gradient(w, g, u, noise, protect_weights, numbers):  # type: ignore[no-untyped-def]
    """Gated step along the gradient; returns the sum of the gates. numbers: centre, width, rate, decay, sigma."""
    wide_vectors()
    centre, width, rate, decay, sigma = numbers
    gates, gate, lanes = 0.0, np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for first in range(0, w.size, SHARE):
        last = min(w.size, first + SHARE)
        lanes[:] = ZERO
        for i in range(first, last, BLOCK):
            e = min(last, i + BLOCK)
            _find_gate(u[i:e], centre, width, gate, lanes)
            _move(w[i:e], g[i:e], gate, noise[i:e], rate, decay, sigma, protect_weights)
        gates += _sum(lanes)
    return gates


@compiled
def move_along_adam(w, u, m, v, noise, protect_weights, numbers):  # type: ignore[no-untyped-def]
    """Gated step along scale * m / (sqrt(v) + eps); returns the sum of the gates.

    numbers: centre, width, rate, decay, sigma, scale, eps
    """
    wide_vectors()
    centre, width, rate, decay, sigma, scale, eps = numbers
    gates, gate, lanes, d = 0.0, np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for first in range(0, w.size, SHARE):
        last = min(w.size, first + SHARE)
        lanes[:] = ZERO
        for i in range(first, last, BLOCK):
            e = min(last, i + BLOCK)
            _find_gate(u[i:e], centre, width, gate, lanes)
            mb, vb = m[i:e], v[i:e]
            for j in range(mb.size):
                d[j] = scale * mb[j] / (np.sqrt(vb[j]) + eps)
            _move(w[i:e], d, gate, noise[i:e], rate, decay, sigma, protect_weights)
        gates += _sum(lanes)
    return gates


@emitted  # type: ignore[untyped-decorator]
def float32_at(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.intp), generate  # type: ignore[no-untyped-call]


@compiled
def observe_gradients(addresses, blocks, firsts, mean, new_mean, kept, new, beta):  # type: ignore[no-untyped-def]
    """Merge the gradients at these addresses (K,), 0 for none, into the running mean and their sums of squares.

    blocks: (2, B) start within its tensor, and length of every block that is looked at; tensor k has those from
            firsts[k] to firsts[k + 1], and the means hold their elements one after another
    kept:   (3, K) power, signal and counts so far;  new: (3, K) power, signal and weights, filled
    """
    wide_vectors()
    starts, lengths = blocks
    lanes = np.empty((2, BLOCK), np.float32)
    place = 0
    for k in range(addresses.size):
        first, last = firsts[k], firsts[k + 1]
        if addresses[k] == 0:
            after = place + lengths[first:last].sum()
            new_mean[place:after] = mean[place:after]
            new[0, k], new[1, k], new[2, k] = 0.0, kept[1, k], 0.0
            place = after
            continue
        lanes[:] = ZERO
        weight = _newest_weight(kept[2, k], beta)
        for b in range(first, last):
            here, n = slice(place, place + lengths[b]), lengths[b]
            g = carray(float32_at(addresses[k] + 4 * starts[b]), n)
            _average(g, mean[here], new_mean[here], np.float32(weight), lanes[0], lanes[1])
            place += n
        n_lanes = lengths[first]
        new[0, k], new[1, k], new[2, k] = _sum(lanes[0, :n_lanes]), _sum(lanes[1, :n_lanes]), weight


@compiled
def _average(g, mean, new_mean, weight, powers, signals):  # type: ignore[no-untyped-def]
    for j in range(g.size):
        new_mean[j] = mean[j] + weight * (g[j] - mean[j])
    for j in range(g.size):
        powers[j] += g[j] * g[j]
    for j in range(g.size):
        signals[j] += new_mean[j] * new_mean[j]


@compiled
def commit_gradients(kept, new):  # type: ignore[no-untyped-def]
    """Take over an observation; returns False, and does nothing, where it is not finite."""
    power, signal, weights = new
    if not np.isfinite(power.sum()):
        return False
    for k in range(weights.size):
        kept[0, k] += weights[k] * (power[k] - kept[0, k])
        kept[1, k] = signal[k]
        kept[2, k] += weights[k] > 0.0
    return True


@compiled
def segment_sums(g, ends, sums, powers):  # type: ignore[no-untyped-def]
    """Per segment sum g and sum g^2."""
    a, b = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    start = 0
    for s in range(ends.size):
        end = ends[s]
        a[:] = 0
        b[:] = 0
        for i in range(start, end, BLOCK):
            block = g[i : min(end, i + BLOCK)]
            for j in range(block.size):
                a[j] += block[j]
            for j in range(block.size):
                b[j] += block[j] * block[j]
        lanes = min(BLOCK, end - start)
        sums[s], powers[s] = _sum(a[:lanes]), _sum(b[:lanes])
        start = end


@compiled
def squared_norms(g, starts, ends, norms):  # type: ignore[no-untyped-def]
    """Fill the sum of squares of every stretch of a gradient, in double precision once lanes are full."""
    wide_vectors()
    lanes = np.empty(BLOCK, np.float32)
    for s in range(len(starts)):
        norms[s] = 0.0
        for i in range(starts[s], ends[s], CHUNK):
            lanes[:] = ZERO
            last = min(ends[s], i + CHUNK)
            for j in range(i, last, BLOCK):
                _add_squares(g[j : min(last, j + BLOCK)], lanes)
            norms[s] += _sum(lanes)


@compiled
def _add_squares(g, lanes):  # type: ignore[no-untyped-def]
    for j in range(g.size):
        lanes[j] += g[j] * g[j]


@compiled
def newest_weights(seen, counts, beta):  # type: ignore[no-untyped-def]
    """(K,) weight of the newest observation in a bias-corrected average, 0 where there is none."""
    weights = np.zeros(seen.size)
    for k in range(seen.size):
        if seen[k]:
            weights[k] = _newest_weight(counts[k], beta)
    return weights


@compiled
def _newest_weight(count, beta):  # type: ignore[no-untyped-def]
    return (1.0 - beta) / (1.0 - beta ** (count + 1.0))


@compiled
def noise_ratios(kept, beta):  # type: ignore[no-untyped-def]
    """(K,) variance over squared mean, from the mean power and the power of the mean; 0 before two observations.

    The mean of t samples keeps the share `overlap` of their variance, the sum of its squared weights. So the spread
    around it misses that share, and a signal below it cannot be told from zero: it counts as that much.
    """
    power, signal, counts = kept
    ratios = np.zeros(power.size)
    for k in range(power.size):
        if counts[k] >= 2 and power[k] > signal[k]:
            decayed = beta ** counts[k]
            overlap = (1.0 - beta) * (1.0 + decayed) / ((1.0 + beta) * (1.0 - decayed))
            variance = (power[k] - signal[k]) / (1.0 - overlap)
            ratios[k] = variance / max(signal[k], overlap * variance)
    return ratios


@compiled
def mean_noise_ratio(kept, sizes, beta):  # type: ignore[no-untyped-def]
    """The ratios' mean weighted by size, over the tensors that were observed at least twice."""
    ratios, counts = noise_ratios(kept, beta), kept[2]
    total = weight = 0.0
    for k in range(sizes.size):
        if counts[k] >= 2:
            total += sizes[k] * ratios[k]
            weight += sizes[k]
    return total / max(weight, 1.0)
