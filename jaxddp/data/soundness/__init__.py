"""Which images can be used: checksums of a manifest, a cache of images found sound, and replacements for bad ones."""
