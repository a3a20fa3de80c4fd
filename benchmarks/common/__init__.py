"""Timing, made-up photographs and samples of processes, which several benchmarks share."""
