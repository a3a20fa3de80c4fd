"""What tests share: data, networks, runs, processes and faults. No test file imports another."""
