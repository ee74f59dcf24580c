"""The application: command line, run folders, reports and benchmarks."""
