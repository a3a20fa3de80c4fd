"""Reports about runs: their files read, and tables and charts of them as text or as one HTML page."""
