"""Finds recipe files, and reads the config in a recipe file that is YAML or JSON."""
