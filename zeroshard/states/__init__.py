"""What a rank stores of a model: units, their flats, and gradients.

This room knows which memory exists and who owns it. It must not know when a step needs it: that is ``schedule``. It
also must not know what the host does: ``offload`` implements the host's ``Home``.

The door is ``Unit`` with its ``Flat``s; a flat leads to its ``FlatGradient`` and its ``Home``. ``Home`` and ``Updates``
are the two interfaces that the device and the host both implement. Read ``unit`` first, then ``flat``, ``gradient`` and
``home``. What users see in ``parameter`` and ``parameter.grad`` is in the room ``shown``. A gradient goes through
``local_gradient`` and ``reduction`` to the ``stash``. ``answers`` is the interface of whoever answers questions about
gradients. ``turns`` orders gathers of flats that the host updates. ``buffers`` are the model's own.
"""
