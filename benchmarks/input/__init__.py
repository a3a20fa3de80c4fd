"""The speed of reading, decoding and verifying images."""
