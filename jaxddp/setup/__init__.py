"""Turns a recipe, data and devices into a run: opens the data, makes the layout, and initializes the network."""
