"""Turns encoded images into batches of pixels, with TensorFlow."""
