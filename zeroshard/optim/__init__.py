"""The optimizer's step: norm, clipping, loss scale, update, and states by piece.

This room knows averaged gradients, the user's optimizer and its states. It must not know hooks, nor the order of
passes: it is told when to step, and asks ``Passes`` for the rest. It must not know where the host's states are: these
are behind ``Home`` and ``Updates``, from ``states``.

The doors are ``ShardedOptimizer`` and, for checkpoints, its ``PieceStates``. Read ``optimizer`` first, then
``treatment`` (calls ``norm``, ``nonfinite`` and ``loss_scale``) and ``device_updates``. ``answers`` answers
what users ask of gradients. ``foreign`` refuses other optimizers.
"""
