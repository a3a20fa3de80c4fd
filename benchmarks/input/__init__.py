"""Benchmarks of reading, decoding and verifying images."""
