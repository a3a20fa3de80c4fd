"""The training step of devices whose slices of a batch have different sizes."""
