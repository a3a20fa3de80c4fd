"""Reports about runs: reads the files of runs, and shows tables and charts as text or as one HTML page."""
