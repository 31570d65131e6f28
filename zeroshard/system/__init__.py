"""Facts about the machine and about torch that all other rooms build on.

This room knows no model and no rank. ``machine`` reads hardware and environment, ``cgroups`` what a container allows,
``device`` the memory of a device, ``cores`` chooses the cores of the host optimizer, ``allocator`` sets torch's GPU
allocator, ``trace`` records what ran when, ``waits`` counts how long a rank had
nothing to do. ``compat``, ``compat_compile`` and ``compat_groups`` have every private name
of torch. ``structures`` finds tensors inside structures, ``hook`` attaches functions to models, ``sizes`` prints sizes,
``memory`` shows tensors as bytes, ``words`` writes the words of others into messages, ``parse`` reads JSON and TOML of
others. Other rooms use all of these files. Read ``machine`` first.
"""
