"""The time of a step: the runtime's schedule, laid out on the resources of a machine.

The room takes the ``Work`` of one rank, a ``Setup`` and a ``Machine``, and knows no module. Its doors are ``step_time``
and ``scale``. Read ``step_time`` first, then ``unit_costs``.
"""
