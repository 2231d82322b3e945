"""Benchmarks and reports: each checks its results before it prints figures."""
