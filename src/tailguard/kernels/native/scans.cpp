// Recurrences over the steps of a rollout (kernels/scans.py).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

namespace nb = nanobind;

namespace tailguard {

using Matrix = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstMatrix = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstVector = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<bool, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstFlags = nb::ndarray<const bool, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

static void reverse_scan(ConstMatrix terms, ConstMatrix carried, ConstVector last, Matrix sums) {
    const size_t n_steps = terms.shape(0), n_envs = terms.shape(1);
    if (carried.shape(0) != n_steps || carried.shape(1) != n_envs || last.shape(0) != n_envs ||
        sums.shape(0) != n_steps || sums.shape(1) != n_envs)
        throw std::invalid_argument("reverse_scan: terms, carried and sums need one shape (T, N), last (N,).");
    const double *after = last.data();
    for (size_t t = n_steps; t-- > 0;) {
        const double *term = terms.data() + t * n_envs, *factor = carried.data() + t * n_envs;
        double *sum = sums.data() + t * n_envs;
        for (size_t n = 0; n < n_envs; ++n) sum[n] = term[n] + (factor[n] != 0.0 ? factor[n] * after[n] : 0.0);
        after = sum;
    }
}

static void walk_periods(ConstMatrix rewards, ConstFlags terminated, ConstFlags truncated, long horizon, Matrix so_far,
                         Matrix elapsed, Flags ended, Flags cut) {
    const size_t n_steps = rewards.shape(0), n_envs = rewards.shape(1);
    const auto shaped = [&](auto &array, size_t rows) { return array.shape(0) == rows && array.shape(1) == n_envs; };
    if (!shaped(terminated, n_steps) || !shaped(truncated, n_steps) || !shaped(ended, n_steps) ||
        !shaped(cut, n_steps) || !shaped(so_far, n_steps + 1) || !shaped(elapsed, n_steps + 1))
        throw std::invalid_argument("walk_periods: so_far and elapsed need shape (T + 1, N), all others (T, N).");
    double *sum = so_far.data(), *count = elapsed.data();
    for (size_t i = 0; i < n_steps * n_envs; ++i) {
        const double after = sum[i] + rewards.data()[i], steps = count[i] + 1.0;
        const bool stop = truncated.data()[i];
        const bool end = terminated.data()[i] || (horizon ? steps >= static_cast<double>(horizon) : stop);
        ended.data()[i] = end;
        cut.data()[i] = stop && !end;
        const bool over = end || stop;
        sum[i + n_envs] = over ? 0.0 : after;
        count[i + n_envs] = over ? 0.0 : steps;
    }
}

void bind_scans(nb::module_ &module) {
    module.def("reverse_scan", &reverse_scan, nb::arg("terms").noconvert(), nb::arg("carried").noconvert(),
               nb::arg("last").noconvert(), nb::arg("sums").noconvert(), nb::call_guard<nb::gil_scoped_release>());
    module.def("walk_periods", &walk_periods, nb::arg("rewards").noconvert(), nb::arg("terminated").noconvert(),
               nb::arg("truncated").noconvert(), nb::arg("horizon"), nb::arg("so_far").noconvert(),
               nb::arg("elapsed").noconvert(), nb::arg("ended").noconvert(), nb::arg("cut").noconvert(),
               nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace tailguard
