"""Parses and checks command lines, and formats help, errors and other output for the terminal."""
