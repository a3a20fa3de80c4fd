"""Pallas kernels that fuse 1x1 convolutions with their batch norms, and a count of the bytes that they move."""
