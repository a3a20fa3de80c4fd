"""Loads the trained network of a run, predicts classes, writes prediction files, and exports weights and programs."""
