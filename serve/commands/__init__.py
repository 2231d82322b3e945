"""Subcommands of `resin`, one a file."""
