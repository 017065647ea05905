// Recurrences over the steps of a rollout (kernels/scans.py).
#include "arrays.h"

namespace tailguard {

static void reverse_scan(Array<const double> terms, Array<const double> carried, Array<const double> last,
                         Array<double> sums) {
    expect(terms, "terms", {-1, -1});
    const int64_t n_steps = terms.shape(0), n_envs = terms.shape(1);
    expect(carried, "carried", {n_steps, n_envs});
    expect(last, "last", {n_envs});
    expect(sums, "sums", {n_steps, n_envs});
    nb::gil_scoped_release released;
    const double *after = last.data();
    for (int64_t t = n_steps; t-- > 0;) {
        const double *term = terms.data() + t * n_envs, *factor = carried.data() + t * n_envs;
        double *sum = sums.data() + t * n_envs;
        for (int64_t n = 0; n < n_envs; ++n) sum[n] = term[n] + (factor[n] != 0.0 ? factor[n] * after[n] : 0.0);
        after = sum;
    }
}

void bind_scans(nb::module_ &module) {
    module.def("reverse_scan", &reverse_scan, nb::arg("terms").noconvert(), nb::arg("carried").noconvert(),
               nb::arg("last").noconvert(), nb::arg("sums").noconvert());
}

}  // namespace tailguard
