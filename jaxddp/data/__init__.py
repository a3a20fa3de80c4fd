"""Data sets for training, validation and prediction: opens them, selects from them, and makes batches."""
