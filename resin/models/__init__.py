"""Models: one Flax file each, on shared building blocks."""
