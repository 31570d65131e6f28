"""How ranks talk: process groups, ordered lanes of collectives, and what was sent.

This room knows tensors and ranks, not parameters or steps. Its door is ``Fabric``. Read ``fabric`` first, then
``lane``.
"""
