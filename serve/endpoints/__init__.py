"""Handlers, one API a file."""
