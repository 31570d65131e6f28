"""What a run uses and moves: memory by kind, volume, and what used the memory when it ran out.

This room reads the tensors of units, homes and optimizer states, and changes nothing. It does not know the plan:
``shard()`` gives it a function that suggests a setting for the out-of-memory message.

Read ``ledger`` first. The doors are ``Ledger`` with the dataclasses ``Memory`` and ``Stats``, and ``shortage.Answer``.
"""
