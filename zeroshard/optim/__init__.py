"""The optimizer's step: norm, clipping, loss scale, update, and states by piece.

This room is told what the gradients are and when to step; it knows no hook. Its door is ``ShardedOptimizer``. Read
``optimizer`` first.
"""
