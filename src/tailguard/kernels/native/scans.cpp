// Recurrences over the steps of a rollout (kernels/scans.py).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

namespace nb = nanobind;

namespace tailguard {

using Matrix = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstMatrix = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstVector = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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

void bind_scans(nb::module_ &module) {
    module.def("reverse_scan", &reverse_scan, nb::arg("terms").noconvert(), nb::arg("carried").noconvert(),
               nb::arg("last").noconvert(), nb::arg("sums").noconvert(), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace tailguard
