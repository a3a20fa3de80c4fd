"""Layers and operations that several networks share."""
