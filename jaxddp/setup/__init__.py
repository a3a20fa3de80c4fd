"""From a recipe, data and devices to a run: opened, laid out, initialized, made ready."""
