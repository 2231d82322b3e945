"""What a forward pass remembers: one protocol, for one whole sequence and for a plan over the arena."""
