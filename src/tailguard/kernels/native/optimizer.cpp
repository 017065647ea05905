// Steps of the UPGD family and the noise of gradients (kernels/optimizer.py): what surrounds the loops over weights.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "levels.h"
#include "optimizer.h"

namespace nb = nanobind;

DECLARE_LEVELS(OptimizerLoops, optimizer_loops)

namespace tailguard {

static const OptimizerLoops &best_loops() {
    static const OptimizerLoops &chosen = BEST_LEVEL(optimizer_loops);
    return chosen;
}

using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstDoubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstPlaces = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// weights, gradient, utility, first and second moment, noise; and its rate, decay, l2, sigma, beta of utility and
// moments, eps and step
using PartArrays = std::tuple<Floats, ConstFloats, Floats, std::optional<Floats>, std::optional<Floats>,
                              std::optional<ConstFloats>>;
using PartNumbers = std::array<double, 9>;

constexpr std::size_t SHARE = 8192;        // weights that are worked on at a time: what is added up does not depend on
                                           // who works
constexpr double LARGEST = 3e38;           // a little below what float32 can hold
constexpr double LARGEST_NOISE = 8.0;      // standard deviations that a float32 generator of normal numbers can reach

static GatedPart part_of(const PartArrays &arrays, const PartNumbers &numbers) {
    const auto &[weights, gradient, utility, first, second, noise] = arrays;
    const auto [rate, decay, l2, sigma, beta_utility, beta1, beta2, eps, step] = numbers;
    const std::size_t size = weights.size();
    const auto fits = [&](const auto &array) { return !array || array->size() == size; };
    if (gradient.size() != size || utility.size() != size || !fits(first) || !fits(second) || !fits(noise) ||
        first.has_value() != second.has_value())
        throw std::invalid_argument("gated_step: gradient, averages and noise need the size of their parameter.");
    const double root = std::sqrt(1.0 - std::pow(beta2, step));
    GatedPart part{};
    part.size = size;
    part.weights = weights.data();
    part.gradient = gradient.data();
    part.utility = utility.data();
    part.first = first ? first->data() : nullptr;
    part.second = second ? second->data() : nullptr;
    part.noise = noise && sigma != 0.0 ? noise->data() : nullptr;
    part.keep_utility = 1.0 - beta_utility;
    part.keep_first = 1.0 - beta1;
    part.keep_second = 1.0 - beta2;
    part.rate = rate;
    part.decay = decay;
    part.l2 = l2;
    part.sigma = sigma;
    part.scale = root / (1.0 - std::pow(beta1, step));
    part.eps = eps * root;
    part.correction = 1.0 - std::pow(beta_utility, step);
    return part;
}

// One call per share of every part: work(part, begin and end of the share, its number).
template <typename Work>
static void for_shares(const std::vector<GatedPart> &parts, Work work) {
    std::size_t number = 0;
    for (const GatedPart &part : parts)
        for (std::size_t begin = 0; begin < part.size; begin += SHARE)
            work(part, begin, std::min(begin + SHARE, part.size), number++);
}

static void include(Survey &whole, const Survey &share) {
    whole.lowest = std::min(whole.lowest, share.lowest);
    whole.highest = std::max(whole.highest, share.highest);
    for (auto size : {&Survey::weight, &Survey::gradient, &Survey::new_utility, &Survey::first, &Survey::second})
        whole.*size = std::max(whole.*size, share.*size);
}

// Whether all numbers of a part are finite after a step along a direction of at most this size.
static bool stays_finite(const GatedPart &part, const Survey &survey, double direction) {
    const double gradient = value_of(survey.gradient) + part.l2 * value_of(survey.weight);
    const double step = 2.0 * (direction + std::abs(double(part.sigma)) * LARGEST_NOISE);  // no gate is above 2
    const double weight = part.decay * value_of(survey.weight) + part.rate * step;
    const double square = part.first ? gradient * gradient : gradient;
    const auto fits = [](double size) { return size <= LARGEST; };  // false for NaN
    return fits(value_of(survey.new_utility)) && fits(value_of(survey.first)) && fits(value_of(survey.second)) &&
           fits(square) && fits(step) && fits(weight);
}

// A bound that costs nothing: Adam's direction is at most the moment over eps.
static double direction_bound(const GatedPart &part, const Survey &survey) {
    const double gradient = value_of(survey.gradient) + part.l2 * value_of(survey.weight);
    return part.first ? part.scale * std::max(value_of(survey.first), gradient) / part.eps : gradient;
}

// The gate's argument is (utility - centre) / width; an infinite width switches the gate off: exactly 1.
static std::pair<double, double> gate_range(double low, double high, bool minmax) {
    if (!minmax) return {0.0, high > 0.0 ? high : INFINITY};  // no weight is of use: none is protected
    // utilities that differ by rounding alone are equal, whatever their size
    const double rounding = 8.0 * std::numeric_limits<float>::epsilon() * std::max(std::abs(low), std::abs(high));
    return {(high + low) / 2.0, high - low > rounding ? (high - low) / 2.0 : INFINITY};
}

// Returns the sum of the gates; nothing, and changes nothing, where `finite_only` and a number might not stay finite.
static std::optional<double> gated_step(const std::vector<PartArrays> &arrays, const std::vector<PartNumbers> &numbers,
                                        bool minmax, bool protect_weights, bool adaptive_noise, bool finite_only) {
    if (arrays.size() != numbers.size()) throw std::invalid_argument("gated_step: a part without numbers.");
    std::vector<GatedPart> parts;
    std::size_t n_shares = 0, n_weights = 0;
    for (std::size_t k = 0; k < arrays.size(); ++k) {
        parts.push_back(part_of(arrays[k], numbers[k]));
        n_weights += parts.back().size;
        n_shares += (parts.back().size + SHARE - 1) / SHARE;
    }
    const nb::gil_scoped_release unlocked;
    const OptimizerLoops &loops = best_loops();

    std::vector<Survey> surveys(n_shares);
    for_shares(parts, [&](const GatedPart &part, std::size_t begin, std::size_t end, std::size_t i) {
        surveys[i] = loops.survey(part, begin, end);
    });
    std::vector<Survey> of_part(parts.size());
    for_shares(parts, [&](const GatedPart &part, std::size_t, std::size_t, std::size_t i) {
        include(of_part[&part - parts.data()], surveys[i]);
    });
    double low = INFINITY, high = -INFINITY;
    for (std::size_t k = 0; k < parts.size(); ++k) {
        low = std::min(low, of_part[k].lowest / parts[k].correction);
        high = std::max(high, of_part[k].highest / parts[k].correction);
    }
    const auto [centre, width] = gate_range(low, high, minmax);

    bool in_range = true;
    for (std::size_t k = 0; k < parts.size(); ++k)
        in_range = in_range && stays_finite(parts[k], of_part[k], direction_bound(parts[k], of_part[k]));
    if (adaptive_noise || (finite_only && !in_range)) {
        std::vector<DirectionSize> sizes(n_shares);
        for_shares(parts, [&](const GatedPart &part, std::size_t begin, std::size_t end, std::size_t i) {
            sizes[i] = loops.direction_size(part, begin, end);
        });
        double power = 0.0;
        Magnitude largest = 0;
        for (const DirectionSize &size : sizes) {
            power += size.power;
            largest = std::max(largest, size.largest);
        }
        in_range = true;
        for (std::size_t k = 0; k < parts.size(); ++k) {
            if (adaptive_noise) parts[k].sigma *= std::sqrt(power / n_weights);
            in_range = in_range && stays_finite(parts[k], of_part[k], value_of(largest));
        }
    }
    if (finite_only && !in_range) return std::nullopt;

    std::vector<double> gates(n_shares);
    for_shares(parts, [&](const GatedPart &part, std::size_t begin, std::size_t end, std::size_t i) {
        gates[i] = loops.move(part, begin, end, float(centre * part.correction), float(width * part.correction),
                              protect_weights);
    });
    double sum = 0.0;
    for (double share : gates) sum += share;
    return sum;
}

static void squared_norms(ConstFloats values, ConstPlaces cuts, Doubles squares) {
    const std::size_t n = squares.size();
    if (cuts.size() != n + 1) throw std::invalid_argument("squared_norms: n spans need n + 1 cuts.");
    for (std::size_t k = 0; k < n; ++k) {
        const std::int64_t begin = cuts.data()[k], end = cuts.data()[k + 1];
        if (begin < 0 || end < begin || std::size_t(end) > values.size())
            throw std::invalid_argument("squared_norms: cuts must not fall, and lie within the values.");
        squares.data()[k] = best_loops().squared_norm(values.data() + begin, end - begin);
    }
}

static void observe_gradient(ConstFloats gradient, ConstPlaces starts, ConstPlaces lengths, ConstPlaces firsts,
                             ConstDoubles weights, ConstFloats mean, Floats new_mean, Doubles power, Doubles signal) {
    const std::size_t n_tensors = weights.size(), n_blocks = starts.size();
    const std::int64_t *first = firsts.data();
    bool fits = firsts.size() == n_tensors + 1 && power.size() == n_tensors && signal.size() == n_tensors &&
                lengths.size() == n_blocks && new_mean.size() == mean.size() && first[0] == 0 &&
                std::size_t(first[n_tensors]) == n_blocks && std::is_sorted(first, first + n_tensors + 1);
    std::size_t observed = 0;
    for (std::size_t b = 0; fits && b < n_blocks; ++b) {
        const std::int64_t start = starts.data()[b], length = lengths.data()[b];
        fits = start >= 0 && length >= 0 && std::size_t(start + length) <= gradient.size();
        observed += length;
    }
    if (!fits || observed != mean.size())
        throw std::invalid_argument("observe_gradient: blocks, means and gradient do not fit.");
    std::size_t place = 0;
    for (std::size_t k = 0; k < n_tensors; ++k) {
        const Observed tensor{gradient.data(), starts.data() + first[k], lengths.data() + first[k],
                              std::size_t(first[k + 1] - first[k]), mean.data() + place, new_mean.data() + place,
                              float(weights.data()[k])};
        best_loops().observe(tensor, power.data()[k], signal.data()[k]);
        for (std::int64_t b = first[k]; b < first[k + 1]; ++b) place += lengths.data()[b];
    }
}

void bind_optimizer(nb::module_ &module) {
    module.def("gated_step", &gated_step, nb::arg("parts").noconvert(), nb::arg("numbers"), nb::arg("minmax"),
               nb::arg("protect_weights"), nb::arg("adaptive_noise"), nb::arg("finite_only"));
    module.def("squared_norms", &squared_norms, nb::arg("values").noconvert(), nb::arg("cuts").noconvert(),
               nb::arg("squares").noconvert(), nb::call_guard<nb::gil_scoped_release>());
    module.def("observe_gradient", &observe_gradient, nb::arg("gradient").noconvert(), nb::arg("starts").noconvert(),
               nb::arg("lengths").noconvert(), nb::arg("firsts").noconvert(), nb::arg("weights").noconvert(),
               nb::arg("mean").noconvert(), nb::arg("new_mean").noconvert(), nb::arg("power").noconvert(),
               nb::arg("signal").noconvert(), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace tailguard
