"""Built-in loss functions; each is a registered file."""
