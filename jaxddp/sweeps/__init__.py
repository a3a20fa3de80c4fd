"""Sweeps: many runs of one config with different values of some keys, each an ordinary run in its own process."""
