"""The work of one rank in a micro-batch, from which times follow."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """The work of one rank in a micro-batch. Tuples go by unit, the root first."""

    parameters: tuple[float, ...]
    """Elements that are gathered."""
    trained: tuple[float, ...]
    """Elements that are reduced and updated."""
    forward: tuple[float, ...]
    """FLOPs."""
    backward: float
    """FLOPs of the blocks' backward with recomputation, divided by the FLOPs of their forward."""
    written: tuple[float, ...]
    """Elements of activations that forward writes. Only blocks count; ``logits`` stands for the root."""
    product: float
    """Multiply-adds of a typical matrix product. The speed of all products follows from this size."""
    logits: float = 0.0
    """Elements of the logits, which the loss reads in fp32."""
    stream: float = 0.0
    """Bytes of the tensors that one block gives to the next, on average."""
    parts: int = 1
    """The number of units in a block."""
    head: float = 0.0
    """The share of the root's trained elements that is reduced as backward begins: flats after the embedding's."""
    recomputed: float = 1.0
    """The share of the blocks that are recomputed, if the setup recomputes any. They are the first ones."""

    def first(self, blocks: int) -> Work:
        """The work of the root and of the first blocks."""
        stop = 1 + blocks * self.parts
        return self._replace(
            parameters=self.parameters[:stop],
            trained=self.trained[:stop],
            forward=self.forward[:stop],
            written=self.written[:stop],
        )
