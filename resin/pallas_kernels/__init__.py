"""Hand-written kernels, each with an XLA reference beside it."""
