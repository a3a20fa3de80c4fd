"""Utilities that all other packages use: errors, files, ranges, durations, and the interface to peer processes."""
