"""The soundness of images: checksums of a manifest, a cache of sound images, and replacements for bad ones."""
