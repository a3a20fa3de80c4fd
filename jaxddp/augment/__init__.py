"""Image augmentation on the device, in training and at test time; each augmentation is a registered file."""
