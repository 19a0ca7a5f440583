"""Benches: each is a module to be run, `python -m benchmarks.NAME --help`."""
