"""Built-in evaluation metrics; each is a registered file."""
