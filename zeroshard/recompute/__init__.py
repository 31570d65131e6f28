"""Activation checkpoints: blocks that run again in backward, and where their inputs wait until then.

This room knows how to run a block twice, and three ways to store its inputs between forward and backward: on the
device as they are, divided among model-parallel ranks (P_a), or in host memory (P_a+cpu). It measures how many blocks
must be recomputed. It does not know units, flats or the optimizer.

Read ``checkpoint`` first, then ``saved_input`` and ``choice``. The doors are ``ActivationCheckpoints``, all checkpoints
of one model, and the function ``checkpoint`` that a model may call itself.
"""
