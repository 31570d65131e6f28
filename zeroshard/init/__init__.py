"""The first values of a sharded model: from the user's module, from initialisers, or from weights on disk.

Read ``materialise`` first.
"""
