"""Activation checkpoints: recomputed blocks, whose inputs are divided among ranks or wait on the host."""
