"""Pretrained weights: reading files of named arrays and matching them with a network."""
