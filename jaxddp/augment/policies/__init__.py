"""Augmentation policies, which draw operations for each image; each is a registered file."""
