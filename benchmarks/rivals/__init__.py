"""The training step beside PyTorch's and Flax's."""
