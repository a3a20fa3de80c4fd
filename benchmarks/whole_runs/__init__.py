"""What a run costs beside its steps: start, checkpoints, hours of training, accuracy."""
