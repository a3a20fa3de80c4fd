"""Functions that plan the batches of a run: balanced classes, microbatches and growing images."""
