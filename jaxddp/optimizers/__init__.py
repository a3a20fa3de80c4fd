"""Built-in optimizers; each is a registered file."""
