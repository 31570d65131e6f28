"""What a rank stores of a model: units, their flats, and gradients.

This room knows which memory exists and who owns it. It must not know when a step needs it: that is ``schedule``. It
also must not know what the host does: ``offload`` implements the host's ``Home``.

The door is ``Unit`` with its ``Flat``s; a flat leads to its ``FlatGradient`` and its ``Home``. ``Home`` and ``Updates``
are the two interfaces that the device and the host both implement. Read ``unit`` first, then ``flat``, ``gradient`` and
``home``. ``shown_parameters``, ``shown_gradients`` and ``placeholder`` are what users see in ``parameter`` and
``parameter.grad``. ``absent`` is the class of parameters whose value is not there. ``sharded_gradient`` is the class of
gradients that are shards, ``question`` what users ask of them, ``factors`` what users multiply them by. ``turns``
orders gathers of flats that the host updates. ``buffers`` are the model's own.
"""
