"""Action laws in compiled loops: parameters, log-probability and entropy, and the way back (action_heads.py).

Arrays: M rows, A actions per row, W outputs of the head's last layer, P parameters of the law.
"""

from __future__ import annotations

import numpy as np

from tailguard.loops import compiled
from tailguard.policy.lstm_kernel import ONE, ZERO

HALF_LOG_2PI = np.float32(0.5 * np.log(2.0 * np.pi))
HALF = np.float32(0.5)


@compiled
def law_terms(output, log_std, actions, parameters, log_prob, entropy):  # type: ignore[no-untyped-def]
    """Fill parameters (M, P), log-probability and entropy (M,); a law without log_std is categorical."""
    if log_std.size:
        gaussian_terms(output, log_std, actions, parameters, log_prob, entropy)
    else:
        categorical_terms(output, actions, parameters, log_prob, entropy)


@compiled
def law_slopes(actions, parameters, d_log_prob, d_entropy, d_output, d_log_std):  # type: ignore[no-untyped-def]
    """Fill the gradient of the output (M, W), add to that of log_std."""
    if d_log_std.size:
        gaussian_slopes(actions, parameters, d_log_prob, d_entropy, d_output, d_log_std)
    else:
        categorical_slopes(actions, parameters, d_log_prob, d_entropy, d_output)


@compiled
def gaussian_terms(output, log_std, actions, parameters, log_prob, entropy):  # type: ignore[no-untyped-def]
    n_rows, n_actions = actions.shape
    for m in range(n_rows):
        log_prob[m] = entropy[m] = ZERO
        for i in range(n_actions):
            z = (actions[m, i] - output[m, i]) * np.exp(-log_std[i])
            parameters[m, i], parameters[m, n_actions + i] = output[m, i], log_std[i]
            log_prob[m] += -HALF * z * z - log_std[i] - HALF_LOG_2PI
            entropy[m] += log_std[i] + HALF + HALF_LOG_2PI


@compiled
def gaussian_slopes(actions, parameters, d_log_prob, d_entropy, d_output, d_log_std):  # type: ignore[no-untyped-def]
    n_rows, n_actions = actions.shape
    for m in range(n_rows):
        for i in range(n_actions):
            inverse = np.exp(-parameters[m, n_actions + i])
            z = (actions[m, i] - parameters[m, i]) * inverse
            d_output[m, i] = d_log_prob[m] * z * inverse
            d_log_std[i] += d_log_prob[m] * (z * z - ONE) + d_entropy[m]


@compiled
def categorical_terms(output, actions, parameters, log_prob, entropy):  # type: ignore[no-untyped-def]
    """The parameters are log-probabilities of the choices, one block of W / A per action."""
    n_rows, width = output.shape
    n_choices = width // actions.shape[1]
    for m in range(n_rows):
        log_prob[m] = entropy[m] = ZERO
        for i in range(actions.shape[1]):
            first = i * n_choices
            largest, total = output[m, first], ZERO
            for k in range(first, first + n_choices):
                largest = max(largest, output[m, k])
            for k in range(first, first + n_choices):
                total += np.exp(output[m, k] - largest)
            for k in range(first, first + n_choices):
                parameters[m, k] = output[m, k] - largest - np.log(total)
                entropy[m] -= np.exp(parameters[m, k]) * parameters[m, k]
            log_prob[m] += parameters[m, first + np.intp(actions[m, i])]


@compiled
def choose(output, chance, chosen):  # type: ignore[no-untyped-def]
    """Fill choices (M, A) by uniform chance (M, A): how many cumulative probabilities it has passed."""
    n_rows, n_actions = chance.shape
    n_choices = output.shape[1] // n_actions
    for m in range(n_rows):
        for i in range(n_actions):
            weights = output[m, i * n_choices : (i + 1) * n_choices]
            largest, total = weights.max(), ZERO
            for weight in weights:
                total += np.exp(weight - largest)
            passed, k = np.exp(weights[0] - largest), 0
            while k < n_choices - 1 and chance[m, i] * total >= passed:
                k += 1
                passed += np.exp(weights[k] - largest)
            chosen[m, i] = k


@compiled
def categorical_slopes(actions, parameters, d_log_prob, d_entropy, d_output):  # type: ignore[no-untyped-def]
    n_rows, width = d_output.shape
    n_choices = width // actions.shape[1]
    for m in range(n_rows):
        for i in range(actions.shape[1]):
            first, pulled = i * n_choices, d_log_prob[m]
            for k in range(first, first + n_choices):
                pulled -= d_entropy[m] * np.exp(parameters[m, k]) * (ONE + parameters[m, k])
            for k in range(first, first + n_choices):
                chance = np.exp(parameters[m, k])
                own = -d_entropy[m] * chance * (ONE + parameters[m, k])
                own += d_log_prob[m] if k == first + np.intp(actions[m, i]) else ZERO
                d_output[m, k] = own - chance * pulled
