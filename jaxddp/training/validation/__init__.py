"""What a run measures of its validation set, and when that ends it."""
