// A step of the UPGD family, norms of spans, and the noise of a gradient (kernels/optimizer.py).
#include "optimizer.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "arrays.h"
#include "levels.h"
#include "pool.h"

DECLARE_LEVELS(OptimizerLoops, optimizer_loops)

namespace tailguard {

static const OptimizerLoops &loops() {
    static const OptimizerLoops &chosen = BEST_LEVEL(optimizer_loops);
    return chosen;
}

// Number of weights, and addresses of weights, gradient, utility, moments and noise (0: none), all float32; an array
// object for each would take longer to make than a small step. kernels/optimizer.py looks at them before.
using PartArrays = std::tuple<size_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;
// Rate, decay, l2, sigma, betas of utility and moments, eps and step
using PartNumbers = std::array<double, 9>;

constexpr size_t SHARE = 8192;          // weights that one task works on: what is added up does not depend on threads
constexpr size_t WORTH_A_THREAD = 16;   // shares; below, waking a thread takes longer than it saves
constexpr double LARGEST = 3e38;        // a little below the largest float32
constexpr double LARGEST_NOISE = 8.0;   // no generator of normal numbers in float32 goes as far

static GatedPart part_of(const PartArrays &arrays, const PartNumbers &numbers) {
    const auto [size, weights, gradient, utility, first, second, noise] = arrays;
    const auto [rate, decay, l2, sigma, beta_utility, beta1, beta2, eps, step] = numbers;
    const auto at = [](uintptr_t address) { return reinterpret_cast<float *>(address); };
    const double root = std::sqrt(1.0 - std::pow(beta2, step));
    return {size, at(weights), at(gradient), at(utility), at(first), at(second), sigma != 0.0 ? at(noise) : nullptr,
            float(1.0 - beta_utility), float(1.0 - beta1), float(1.0 - beta2), float(rate), float(decay), float(l2),
            float(sigma), float(root / (1.0 - std::pow(beta1, step))), float(eps * root),
            1.0 - std::pow(beta_utility, step)};
}

// Whether no number of a part can leave float32, judged by the largest that is there
static bool stays_finite(const GatedPart &part, double largest) {
    const double gradient = largest * (1.0 + part.l2);
    const double direction = part.first ? part.scale * gradient / part.eps : gradient;
    const double step = 2.0 * (direction + std::abs(double(part.sigma)) * LARGEST_NOISE);  // no gate is above 2
    const double weight = part.decay * largest + part.rate * step;
    return gradient * gradient <= LARGEST && step <= LARGEST && weight <= LARGEST;  // false for NaN
}

// Returns the sum of the gates; nothing, and changes nothing, where `finite_only` and a number might not stay finite
static std::optional<double> gated_step(const std::vector<PartArrays> &arrays, const std::vector<PartNumbers> &numbers,
                                        bool minmax, bool protect_weights, bool finite_only, int n_threads) {
    struct Share {
        GatedPart *part;
        size_t begin, end;
        Survey survey;
        double gates;
    };
    if (arrays.size() != numbers.size()) throw std::invalid_argument("gated_step: every part needs its numbers.");
    std::vector<GatedPart> parts;
    for (size_t k = 0; k < arrays.size(); ++k) parts.push_back(part_of(arrays[k], numbers[k]));
    std::vector<Share> shares;
    for (GatedPart &part : parts)
        for (size_t begin = 0; begin < part.size; begin += SHARE)
            shares.push_back({&part, begin, std::min(begin + SHARE, part.size), {}, 0.0});

    const nb::gil_scoped_release unlocked;
    const int n_shares = int(shares.size());
    if (shares.size() < WORTH_A_THREAD) n_threads = 1;
    parallel(n_shares, n_threads, [&](int i) {
        Share &share = shares[i];
        share.survey = loops().survey(*share.part, share.begin, share.end);
    });

    double low = INFINITY, high = -INFINITY;
    for (const Share &share : shares) {
        if (finite_only && !stays_finite(*share.part, share.survey.largest)) return std::nullopt;
        low = std::min(low, share.survey.lowest / share.part->correction);
        high = std::max(high, share.survey.highest / share.part->correction);
    }
    // The gate's argument is (utility - centre) / width; an infinite width switches the gate off: exactly 1
    double centre = 0.0, width = high > 0.0 ? high : INFINITY;  // no weight is of use: none is protected
    if (minmax) {
        // utilities that differ by rounding alone are equal, whatever their size
        const double rounding = 8.0 * std::numeric_limits<float>::epsilon() * std::max(std::abs(low), std::abs(high));
        centre = (high + low) / 2.0;
        width = high - low > rounding ? (high - low) / 2.0 : INFINITY;
    }

    parallel(n_shares, n_threads, [&](int i) {
        Share &share = shares[i];
        const double correction = share.part->correction;
        share.gates = loops().move(*share.part, share.begin, share.end, float(centre * correction),
                                   float(width * correction), protect_weights);
    });
    double gates = 0.0;
    for (const Share &share : shares) gates += share.gates;
    return gates;
}

static std::vector<double> squared_norms(Array<const float> values, Array<const int64_t> cuts) {
    const int64_t n = int64_t(cuts.size()) - 1, *cut = cuts.data();
    if (n < 0 || cut[0] < 0 || cut[n] > int64_t(values.size()) || !std::is_sorted(cut, cut + n + 1))
        throw std::invalid_argument("squared_norms: cuts must not fall, and lie within the values.");
    std::vector<double> squares;
    for (int64_t k = 0; k < n; ++k) squares.push_back(loops().squared_norm(values.data() + cut[k], cut[k + 1] - cut[k]));
    return squares;
}

// Which blocks of the gradients of some tensors are observed
class GradientObserver {
  public:
    GradientObserver(Array<const int64_t> sizes, Array<const int64_t> starts, Array<const int64_t> lengths,
                     Array<const int64_t> firsts)
        : starts_(starts.data(), starts.data() + starts.size()),
          lengths_(lengths.data(), lengths.data() + lengths.size()),
          firsts_(firsts.data(), firsts.data() + firsts.size()) {
        const size_t n = sizes.size(), n_blocks = starts_.size();
        bool fits = lengths_.size() == n_blocks && firsts_.size() == n + 1 && firsts_[0] == 0 &&
                    firsts_[n] == int64_t(n_blocks) && std::is_sorted(firsts_.begin(), firsts_.end());
        for (size_t k = 0; fits && k < n; ++k)
            for (int64_t b = firsts_[k]; b < firsts_[k + 1]; n_observed_ += lengths_[b++])
                fits = fits && starts_[b] >= 0 && lengths_[b] >= 0 && starts_[b] + lengths_[b] <= sizes.data()[k];
        if (!fits) throw std::invalid_argument("GradientObserver: the blocks do not fit their tensors.");
    }

    // Fills what the means and the rows power, signal and count of `kept` become with the float32 gradients at these
    // addresses, one for each tensor; nothing changes of one without (0)
    void observe(Array<const uint64_t> addresses, double beta, Array<const float> mean, Array<const double> kept,
                 Array<float> new_mean, Array<double> new_kept) const {
        const int64_t n = int64_t(firsts_.size()) - 1;
        expect(addresses, "addresses", {n}), expect(kept, "kept", {3, n}), expect(new_kept, "new_kept", {3, n});
        expect(mean, "mean", {n_observed_}), expect(new_mean, "new_mean", {n_observed_});
        int64_t place = 0;
        for (int64_t k = 0; k < n; ++k) {
            const double power = kept.data()[k], signal = kept.data()[n + k], count = kept.data()[2 * n + k];
            double &new_power = new_kept.data()[k], &new_signal = new_kept.data()[n + k];
            const int64_t first = firsts_[k], last = firsts_[k + 1], begin = place;
            for (int64_t b = first; b < last; ++b) place += lengths_[b];
            const auto gradient = reinterpret_cast<const float *>(addresses.data()[k]);
            if (gradient) {
                const double weight = (1.0 - beta) / (1.0 - std::pow(beta, count + 1.0));
                loops().observe({gradient, starts_.data() + first, lengths_.data() + first, size_t(last - first),
                                 mean.data() + begin, new_mean.data() + begin, float(weight)},
                                new_power, new_signal);
                new_power = power + weight * (new_power - power);
            } else {
                std::copy(mean.data() + begin, mean.data() + place, new_mean.data() + begin);
                new_power = power, new_signal = signal;
            }
            new_kept.data()[2 * n + k] = count + (gradient != nullptr);
        }
    }

  private:
    std::vector<int64_t> starts_, lengths_, firsts_;
    int64_t n_observed_ = 0;
};

void bind_optimizer(nb::module_ &module) {
    const nb::call_guard<nb::gil_scoped_release> unlocked;
    module.def("gated_step", &gated_step, nb::arg("parts"), nb::arg("numbers"), nb::arg("minmax"),
               nb::arg("protect_weights"), nb::arg("finite_only"), nb::arg("n_threads"));
    module.def("squared_norms", &squared_norms, nb::arg("values").noconvert(), nb::arg("cuts").noconvert(), unlocked);
    nb::class_<GradientObserver>(module, "GradientObserver")
        .def(nb::init<Array<const int64_t>, Array<const int64_t>, Array<const int64_t>, Array<const int64_t>>(),
             nb::arg("sizes"), nb::arg("starts"), nb::arg("lengths"), nb::arg("firsts"))
        .def("observe", &GradientObserver::observe, nb::arg("addresses").noconvert(), nb::arg("beta"),
             nb::arg("mean").noconvert(), nb::arg("kept").noconvert(), nb::arg("new_mean").noconvert(),
             nb::arg("new_kept").noconvert(), unlocked);
}

}  // namespace tailguard
