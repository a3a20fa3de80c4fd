"""The composition of a run's batches as a function of the step: balanced classes, microbatches, growing images."""
