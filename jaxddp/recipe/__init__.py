"""Makes the objects of a recipe from a config, hooks or arguments, and lays a run out over data and devices."""
