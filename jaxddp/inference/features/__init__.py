"""Features of images: their files, and classifiers of features."""
