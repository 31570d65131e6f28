"""How ranks talk: process groups, ordered lanes of collectives, and a count of what was sent.

This room knows tensors and ranks. It knows nothing of units, gradients or steps. Its door is ``Fabric``: the ranks that
share a model. Read ``fabric`` first, then ``lane`` (order), ``transport`` (how tensors travel), ``grid`` (which ranks
share what), ``watchdog`` (who is missing). ``parallel`` is what other rooms need to know about tensor parallelism.
"""
