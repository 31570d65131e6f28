"""When things happen: hooks on the model gather, reduce and release its units.

This room knows units and passes. It knows nothing of the optimizer's arithmetic or of how tensors travel. Its doors
are ``Schedule`` (forward and backward), ``Reducer`` (gradients, and the agreement of ranks), ``Reads`` (parameters
that user code uses between passes), ``Gathering`` (whole parameters for a block of code, or unit by unit) and
``Guards`` (what users do to a model besides training it). Read ``hooks`` first, then ``lifetimes`` and ``reducer``.
``order`` remembers the order of units, ``outputs`` hooks tensors, ``border`` casts and scales where tensors enter and
leave the model, ``structure`` refuses parameters that come after ``shard()``, ``transforms`` serves calls inside
``torch.func``, ``compiled`` keeps all this out of what ``torch.compile`` compiles, ``sleep`` puts model states into
host memory while something else has the device.
"""
