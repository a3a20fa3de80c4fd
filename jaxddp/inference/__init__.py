"""Loads a run's network; predicts classes, reads layers, writes files of results, exports weights and programs."""
