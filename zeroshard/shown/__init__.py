"""What users see of a model whose parameters and gradients are not there: the classes that answer in their place.

This room knows what torch's functions ask of a tensor. It must not know where values are, nor how ranks bring them: it
asks a ``Source`` for parameters and an ``Owner`` for gradients, which ``states`` implements.

Read ``absent`` first: the class of a parameter whose value is not there. ``sharded_gradient`` is the class of a
gradient that is a shard, ``question`` what users ask of it, ``factors`` what users multiply it by. ``parameters`` and
``gradients`` say what the parameters of one flat show. ``fingerprint`` finds writes that autograd does not count.
``placeholder`` is the last resort.
"""
