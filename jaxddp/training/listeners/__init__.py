"""Listeners of a run: its history, its files, and tracking services."""
