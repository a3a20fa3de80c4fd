"""1x1 convolutions fused with their batch norms as Pallas kernels, and the bytes that they move."""
