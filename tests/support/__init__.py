"""Helpers of tests: data, networks, runs, processes and faults. No test file imports another."""
