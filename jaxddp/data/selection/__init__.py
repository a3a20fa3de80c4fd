"""Selections from a data set: some classes, a balanced share, a validation split, or given rows."""
