"""The first values of a sharded model: from the user's model, from initialisers, or from weights on disk.

This room knows units and flats, and how their memory gets values. It knows nothing of training: it works once, inside
``shard()``. ``materialise`` is the door (``adopt_values``), and the file to read first. ``initialisers`` finds the
initialisers of a model and their order, ``meta`` takes tensors off the meta device, ``weights`` finds
the model's tensors on disk, ``joined`` knows which of them transformers joins, ``safetensors_file`` reads them.
"""
