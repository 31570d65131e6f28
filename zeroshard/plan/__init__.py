"""What fits and how fast it is, told before anything runs.

The plan builds the model without memory, traces a few of its blocks, and computes from the trace the memory of one
rank, the volume and the time of a step, for every stage and offload. Nothing here communicates and nothing here trains.
The one exception is ``dryrun``, which runs one rank of N and is a client of the api; no other file may import the api
or talk to other ranks.

Rooms inside, each imports only those before it: ``machine``, ``time``, ``model``, ``memory``, ``papers``. Read
``setup`` first (how a model is trained), then ``model``, ``memory``, ``volume`` (communication), ``time`` and
``advice`` (all stages and offloads side by side). There are two doors: ``advice.plan`` for the command line and
``foresee.Foresight`` for ``shard()``, whose "auto" chooses from ``candidates``.
"""
