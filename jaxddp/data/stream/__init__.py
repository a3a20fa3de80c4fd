"""Decode images to batches of pixels with TensorFlow."""
