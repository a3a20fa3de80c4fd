"""What every other package uses: errors, files, ranges, durations, and the interface to peer processes."""
