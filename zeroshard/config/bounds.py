"""Bounds on the buffers of a step, and on the memory that may be used. They do not grow with the model (ZeRO's C_B).

The runtime uses these bounds, and the plan counts with them.
"""

from __future__ import annotations

DEPOSIT_BYTES = 32 << 20
"""Gradients of a flat are copied together when they have this size."""

DEFAULT_PREFETCH = 2
"""Stage 3: units that are gathered before they are needed, unless ``prefetch`` says otherwise."""

IN_FLIGHT = 2
"""Reduces that run at a time. Bounds the memory of gradients that are not yet shards."""

ON_THEIR_WAY = 2
"""Checkpoints that are copied to the host at a time. Bounds the device memory that they still use."""

MESSAGE_BYTES = 64 << 20
"""Small tensors travel together in messages of at most this size: buffers, and whole parameters after an update."""

UPDATE_ELEMENTS = 64 << 20
"""One call of the optimizer updates at least this many elements: 256 MiB of gradients in fp32."""

FIRST_ELEMENTS = 16 << 20
"""As ``UPDATE_ELEMENTS``, for the first call: fewer, so that the next forward's first units are gathered earlier."""

FRAGMENTS = 0.04
"""Share of a device that stays unused, because torch's caching allocator loses about so much to fragments: memory that
is free, but in pieces that are too small."""

KEPT_FRAGMENTS = 0.08
"""As ``FRAGMENTS``, for blocks that keep their activations to fill a device without expandable segments. A model of 14
billion parameters lost 7% of 140 GiB in this way."""
