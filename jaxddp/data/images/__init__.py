"""Image files without TensorFlow: their headers, whether they are sound, and their pixels."""
