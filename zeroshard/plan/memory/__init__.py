"""The memory of one rank, at rest and at its peak.

The room knows how this runtime uses memory in every stage and offload. It takes a ``Trace`` and a ``Setup``. Its door
is ``budget``; read ``rank_memory`` next.
"""
