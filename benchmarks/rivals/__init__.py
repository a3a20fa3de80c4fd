"""Comparisons of the training step with those of PyTorch and Flax."""
