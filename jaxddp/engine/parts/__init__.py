"""Optional parts of the training step, each with its own arrays in the state."""
