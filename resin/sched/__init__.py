"""Requests, cache pages, policy and planning: pure Python and NumPy."""
