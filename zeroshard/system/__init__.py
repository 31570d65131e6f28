"""Facts about the machine and about torch that everything else builds on.

This room knows no model and no rank. ``machine`` reads hardware and environment, ``compat`` holds every private name of
torch, ``trace`` records what ran when, ``hook`` and ``structures`` are small tools for models of any kind. Read
``machine`` first.
"""
