"""Benchmarks of the step's options and checks, and of its memory."""
