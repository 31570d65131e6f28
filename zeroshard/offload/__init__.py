"""Optimizer states on the host: the kernel that updates them, and what feeds it."""
