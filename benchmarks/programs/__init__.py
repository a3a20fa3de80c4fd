"""Counts of the kernels, bytes and collectives of compiled training steps, and models of their time, without a GPU."""
