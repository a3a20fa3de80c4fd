"""Built-in training objectives; each is a registered file."""
