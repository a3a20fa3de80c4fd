"""Image augmentation on the device, in training and at test time. Most modules register an augmentation."""
