"""Decode images to batches of pixels."""
