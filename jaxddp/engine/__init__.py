"""The compiled training and evaluation steps: gradients, their average over devices, and the training state."""
