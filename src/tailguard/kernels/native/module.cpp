// The extension module tailguard.kernels._native: what each family of kernels offers, and what the module was built of.
//
// A new family: one .cpp (and _level.cpp for code that is worth compiling per instruction set) with a function
// bind_<family>(module), declared and called here, its signatures in _native.pyi, its reference in kernels/reference/.
#include <nanobind/nanobind.h>

#include "levels.h"

namespace nb = nanobind;

namespace tailguard {
void bind_acting(nb::module_ &module);
void bind_gradients(nb::module_ &module);
void bind_market(nb::module_ &module);
void bind_optimizer(nb::module_ &module);
void bind_scans(nb::module_ &module);
}  // namespace tailguard

NB_MODULE(_native, module) {
    module.attr("source_digest") = SOURCE_DIGEST;
    module.attr("level") = tailguard::level_name(tailguard::best_level());
    tailguard::bind_acting(module);
    tailguard::bind_gradients(module);
    tailguard::bind_market(module);
    tailguard::bind_optimizer(module);
    tailguard::bind_scans(module);
}
