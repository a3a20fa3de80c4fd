"""Sound images, which decode to the last pixel: checksums, a cache of sound images, and substitutes."""
