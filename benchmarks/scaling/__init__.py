"""What size costs, in time and memory: `python -m benchmarks.scaling`."""
