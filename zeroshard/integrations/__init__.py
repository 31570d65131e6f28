"""Libraries that people train with, and how each of them trains a sharded model: one file a library.

DeepSpeed, whose configurations are read too, and Lightning, which has two loops, are folders.

An integration is a client of the api, as a user's own loop is. It knows its library's points of extension, and nothing
of units, flats or ranks. Its library is imported only by its file, so that ``import zeroshard`` needs none of them. A
library that is missing is named, with the command that installs it (``requirement.require``). Read ``accelerate.py``
first: ``transformers.py`` builds on it. Parts of both are ``adapters.py`` (what a save of PEFT's adapters needs) and
``compiled_blocks.py`` (what `torch_compile=True` compiles).
"""
