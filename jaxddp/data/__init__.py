"""Data sets for training, validation and prediction: opening, selection of examples, and batches."""
