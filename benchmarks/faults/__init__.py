"""The jobs, faults and promises of `benchmarks/chaos.py`."""
