"""Checkpoints: saved and restored through Orbax, and verified by manifests."""
