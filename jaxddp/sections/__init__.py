"""The sections of a config: their keys, types, ranges and defaults, and the forms that their values are written in."""
