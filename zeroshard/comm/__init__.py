"""How ranks talk: process groups, ordered lanes of collectives, and a count of what was sent.

This room knows tensors and ranks. It knows nothing of units, gradients or steps. Its door is ``Fabric``: the ranks that
share a model. Read ``fabric`` first, then ``lane`` (order), ``transport`` (how tensors travel), ``traffic`` (how much),
``exchange`` (small values from host to host), ``messages`` (small tensors together), ``grid`` (which ranks share what),
``process_group`` (its start and end). When a rank is missing: ``watchdog`` (which rank, and in which call), ``lookout``
(collectives that would never end), ``posts`` (what ranks tell about themselves), ``store`` (asked in bounded time),
``meeting`` (do all ranks make a call). ``consistency`` checks that all ranks were given the same. ``parallel`` tells
other rooms what they need to know about tensor parallelism.
"""
