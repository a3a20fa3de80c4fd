"""The ways in which devices divide a training step."""
