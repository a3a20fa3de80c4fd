"""Benchmarks of the scaling and the control plane of jobs with several processes."""
