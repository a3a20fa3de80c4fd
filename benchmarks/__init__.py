"""Benchmarks: the scripts of this folder are commands, and each folder holds the benchmarks of one subject."""
