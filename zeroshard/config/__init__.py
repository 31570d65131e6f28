"""What a user may ask for, and the pure maths that follows from it.

This room makes no tensor and talks to nobody. ``options`` and ``offload`` hold the options of ``shard()``, ``job``
those of ``zeroshard train``, ``table`` the extents and places that a stage stands for, ``layout`` the way from
parameters to units, flats and shards. Read ``table`` first.
"""
