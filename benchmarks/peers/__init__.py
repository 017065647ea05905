"""Environment steps per second, ours against other recurrent PPOs, on the same work: `python -m benchmarks.peers`."""
