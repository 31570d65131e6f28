"""Activation checkpoints: blocks that backward computes again, and where their inputs wait until then.

Read ``checkpoint`` first.
"""
