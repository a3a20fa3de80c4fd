"""Benchmarks of whole runs: start, checkpoints, long training, accuracy against time."""
