"""What fits and how fast it is, told before anything runs.

The room knows the numbers of a model (sizes of parameters and activations, FLOPs), of a setup (stage, offload, batch)
and of a machine. From them it computes the memory of one rank, the volume and the time of a step. Nothing here
communicates and nothing here trains. The one exception is ``dryrun``, which runs one rank of N and is a client of the
api; no other file may import the api or talk to other ranks.

Read ``shape`` first (the model and the setup), then ``budget`` (memory), ``volume`` (communication), ``time`` (seconds)
and ``choice`` (all stages and offloads side by side). The room has two doors: ``choice.plan`` for the command line and
``foresee.Foresight`` for ``shard()``.
"""
