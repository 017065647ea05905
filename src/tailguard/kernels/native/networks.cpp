#include "networks.h"

#include "levels.h"

DECLARE_LEVELS(Kernels, network_kernels)

namespace tailguard {

const Kernels &kernels() {
    static const Kernels &chosen = BEST_LEVEL(network_kernels);
    return chosen;
}

}  // namespace tailguard
