"""Sizes that bound the buffers a step fuses things in, whatever the size of the model (ZeRO's C_B).

They stand here, below everything, so that the runtime uses them and the plan counts with them.
"""

from __future__ import annotations

DEPOSIT_BYTES = 32 << 20
"""Gradients wait for others of their flat, to be copied together, until they are this large."""

IN_FLIGHT = 2
"""Reduces under way at a time. Bounds the memory of gradients that are not yet shards."""

ON_THEIR_WAY = 2
"""Checkpoints whose copies to the host are under way, at most. Bounds the device memory that they still hold."""

MESSAGE_BYTES = 64 << 20
"""Buffers of a model are broadcast together in messages of this size, at most, unless one buffer is larger."""

UPDATE_ELEMENTS = 64 << 20
"""Elements that one call of the optimizer updates, at least; 256 MiB of gradients in fp32."""

FIRST_ELEMENTS = 16 << 20
"""The same for the first call, which is smaller so that what the next forward begins with is gathered the earlier."""
