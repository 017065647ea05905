"""The door to the native core: a few large functions on arrays, each with a reference in Python that defines it.

The core is an extension module compiled from `native/*.cpp`: by `make core` in a checkout, by pip when the package is
installed. Where it is missing, or with TAILGUARD_KERNELS=reference, everything runs in torch and numpy, slower.
"""

from __future__ import annotations

from tailguard.kernels.core import available_cores, native, stale, status

__all__ = ["available_cores", "native", "stale", "status"]
