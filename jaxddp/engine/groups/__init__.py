"""Groups of devices that average their parameters every few steps in place of the gradients of each step."""
