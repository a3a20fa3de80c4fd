"""Turns a recipe, data and devices into a run: opens, lays out, initializes and prepares it."""
