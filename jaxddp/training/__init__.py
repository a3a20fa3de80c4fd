"""The training loop, validation, checkpoints, and the listeners that report progress."""
