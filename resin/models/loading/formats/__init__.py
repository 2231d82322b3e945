"""Number formats of packed tensors, decoded with NumPy: a module each."""
