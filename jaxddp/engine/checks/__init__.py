"""Checks that the devices compute the right gradient and hold the same state."""
