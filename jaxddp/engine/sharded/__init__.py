"""A training step whose parameters and optimizer state are divided among the devices."""
