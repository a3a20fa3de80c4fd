"""From encoded images to batches of pixels, with TensorFlow."""
