"""The progress of a run on the screen."""
