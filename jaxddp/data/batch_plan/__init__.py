"""What the batches of a run are made of, as functions of the step: balanced classes, microbatches, growing images."""
