"""The host's home: optimizer states in host memory, and their update by the host (ZeRO-Offload).

This room knows host memory, the copies between host and device, and the optimizers that have a host kernel. It must not
know stages, hooks, or the order of forward and backward: it is told the order of flats. Its threads issue no
collective. Its door is ``place_on_host`` (``place.py``), which gives flats their home here, and ``HostStep``
(``step.py``), which asks for the updates of one step. The planner also reads sizes and constants from here.

Read ``pipeline.py`` first. It explains the two threads and the way of one gradient: the *mover* copies the gradient to
the host, the *updater* runs the kernel and starts the copy of the new parameters back. The other files:

- ``place.py``, ``step.py``, ``home.py``: what other rooms ask for, on the training thread.
- ``transfer.py``, ``update.py``, ``worker.py``: one flat's copies, its update, and a thread that does jobs.
- ``host_buffers.py``, ``pinned.py``: which buffers a flat has, and their memory.
- ``rules.py``, ``kernel.py``, ``library.py``, ``fallback.py``, ``native/``: the optimizer itself.
- ``dry.py``: the threads and the kernel of a dry run.
"""
