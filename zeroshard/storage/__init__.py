"""Checkpoints on disk: from any setup to any other, nothing lost, and no code run on load.

This room knows units, flats and the optimizer's states, and turns them into files and back. It makes no step and hooks
nothing. Its doors are ``save.save``, ``load.load`` and ``export.export``. Read ``format`` first: it shows the files.

A save goes through ``save`` (ranks agree), ``contents`` (what this rank writes; ``values`` turns other values than
tensors into JSON, ``random_state`` reads the generators, ``frozen`` describes frozen parameters that are left out),
``folder`` (where to write), ``claim`` (one job a folder),
``background`` (copies; writes while training goes on; on rank 0 writes index and marker, which make the checkpoint
complete) and ``write`` (bytes to disk). A load goes through ``load``, ``folder`` (the newest), ``read`` (index and
elements), ``limits`` (how large an index may be), ``validate`` (refuses before anything is touched), ``elements``
(numbers that training cannot go on from) and ``regions`` (maths of ranges that overlap). ``export`` reads in the same
way, checks what an ``adapter`` says, and writes whole tensors with ``output``.
"""
