"""What a run uses and moves: memory by kind, volume, and what used the memory when it ran out.

This room reads the buffers of the runtime below it and changes nothing. It does not know the plan: whoever wants a
suggestion in an out-of-memory message gives it a function that makes one.

Read ``ledger`` first. The doors are ``Ledger`` with the dataclasses ``Memory`` and ``Stats``, and ``shortage.Answer``.
"""
