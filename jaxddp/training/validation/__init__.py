"""Validation of a run: metrics, predictions to show, and early stopping."""
