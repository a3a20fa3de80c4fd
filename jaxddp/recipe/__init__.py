"""Makes the objects of a recipe from a config, hooks or arguments, and the layout of a run on its data and devices."""
