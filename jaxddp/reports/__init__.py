"""Reads the files of runs, and makes tables and charts of them, as text or as an HTML page."""
