"""What a user may ask for, and the pure maths that follows from it.

This room makes no tensor and communicates nothing. Its door is ``options.Config``, every option of ``shard()``, and
``job.load_job``, which reads a job of ``zeroshard train``. ``offload`` and ``activations`` have the options of these,
``checks`` is the one validator of all of them. ``table`` says which extent and place a stage stands for, ``layout``
leads from parameters to units, flats and shards, ``bounds`` has sizes of buffers, ``optimizers`` is the table of
optimizers that can be sharded. Read ``table`` first, then ``options``.
"""
