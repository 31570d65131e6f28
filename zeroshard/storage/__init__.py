"""Checkpoints: any setup to any other, nothing lost, and no code run on load."""
