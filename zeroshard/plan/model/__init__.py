"""The model of a plan: how it is built on the meta device, and what tracing it finds.

The room knows modules: presets, configurations of Hugging Face, functions of users, adapters, the part of one
model-parallel rank. It does not know stages, offloads or machines. Its door is ``Model.trace``, which returns a
``Trace``: units, activations and FLOPs. ``source`` finds a model by its name.

Read ``tracer`` first, then ``trace`` (the result) and ``blocks`` (why a few blocks are enough).
"""
