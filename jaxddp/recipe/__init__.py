"""What was asked for: a recipe file, its sources and its hooks."""
