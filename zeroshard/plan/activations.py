"""What forward leaves for backward, and the most that is alive at a time: the papers' formula, a transformer's own.

Counted as torch runs a decoder with fused attention, op by op: a tensor is counted as long as autograd or the module
that made it holds on to it. Model parallelism divides what is inside attention and MLP, and the logits; the residual
stream stays whole, and so does what a checkpoint keeps of it, unless it is divided too (P_a) or on the host (P_a+cpu).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..config.bounds import ON_THEIR_WAY
from ..offload.pinned import aligned
from ..recompute.part import part_of
from .shape import Setup, Transformer

PAPER_TENSORS = 12
"""Tensors of batch · sequence · hidden elements that a block leaves, as ZeRO, section 3.2, estimates it."""


def paper_activations(model: Transformer, setup: Setup, *, divided: bool = False) -> float:
    """Bytes by ZeRO's estimate: 12 · hidden · batch · sequence · layers elements, of which checkpointing keeps one.

    ``divided``: checkpoints are divided among the model-parallel ranks (P_a).
    """
    tensors = 1 if setup.checkpointing else PAPER_TENSORS
    ranks = setup.model_parallel if divided else 1
    return setup.width * tensors * model.hidden * setup.batch * setup.sequence * model.layers / ranks


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes alive beside model states in one micro-batch. Tuples go by block: the root's entry, then each block's."""

    saved: int
    """What forward leaves for backward."""
    forward: tuple[int, ...]
    """The most while the forward of a block runs, all before it included."""
    loss: int
    """The most between the forward of the last block and its backward."""
    backward: tuple[int, ...]
    """The most while the backward of a block runs."""
    after_backward: tuple[int, ...]
    """When the last gradient of a block has come."""
    host: int = 0
    """Checkpoints on the host, at most."""
    early_root_gradients: int = 0
    """Gradients of the root's that come before those of the blocks, and so wait for the others."""


class CheckpointShape(NamedTuple):
    """Elements of one block's checkpoint."""

    stored: int
    """What a rank keeps of it, at most."""
    gathered: int
    """What model-parallel ranks gather to have it again (P_a), padding included."""


def checkpoint_shape(model: Transformer, setup: Setup) -> CheckpointShape:
    """Of what goes from block to block.

    >>> from ..config.options import Activations
    >>> gpt = Transformer(layers=2, hidden=64, heads=4, vocabulary=256)
    >>> setup = Setup(stage=2, model_parallel=4, sequence=15, activations=Activations(partition=True))
    >>> checkpoint_shape(gpt, setup)
    CheckpointShape(stored=256, gathered=1024)
    """
    whole, kept = setup.batch * setup.sequence * model.hidden, setup.activations
    ranks = setup.model_parallel if kept is not None and kept.partition else 1
    part = part_of(whole, ranks)
    return CheckpointShape(min(part, whole), ranks * part if ranks > 1 else 0)


def transformer_activations(model: Transformer, setup: Setup) -> ActivationBytes:
    """Those of one micro-batch on one rank."""
    width, ranks = setup.width, setup.model_parallel
    tokens = setup.batch * setup.sequence
    stream = tokens * model.hidden * width  # one tensor of the residual stream
    inside = tokens * width / ranks  # one element a token, of what model parallelism divides
    logits = tokens * model.vocabulary / ranks  # elements
    table = int(model.vocabulary * model.hidden * width / ranks)  # the embedding's gradient

    mlp, attention = model.mlp_width * inside, 2 * (model.query_width + model.kv_width) * inside
    row_sums = 4 * setup.batch * setup.sequence * model.heads / ranks  # fp32, of attention
    habits, activation = model.habits, model.activation
    copies = (habits.copies if setup.checkpointing else habits.cached_copies) * model.query_width * inside
    masks = habits.dropouts * tokens * model.hidden
    if model.biases:  # LayerNorm keeps its input, and mean and deviation in fp32
        norm_input, norm = stream, 8 * tokens
    else:  # RMSNorm as it is mostly written: an fp32 copy of its input, its scale, and the normalised values
        norm_input, norm = 0, 4 * tokens * model.hidden + 4 * tokens + stream
    if model.head_norms:  # as RMSNorm does
        heads = model.heads + (model.kv_heads or model.heads)
        attention += tokens * (model.normed_width * (4 + width) + 4 * heads) / ranks
    # Queries, keys, values and result; norms and what they give to the next matrix; of the MLP what its activation
    # takes and gives, and where it is gated also the gate's partner and their product.
    block = int(attention + copies + row_sums + masks + 2 * (norm_input + norm + stream) + activation.saved * mlp)
    if habits.one_input:
        block -= norm_input
    checkpoint = stream if setup.checkpointing else block
    recomputed = block - norm_input if setup.checkpointing else 0  # its input is the checkpoint
    passing = int(2 * stream + activation.forward_peak * mlp) if setup.checkpointing else 2 * stream
    kept, host = setup.activations, 0
    if setup.checkpointing and kept is not None and (kept.partition or kept.offload):
        recomputed += (1 + kept.prefetch) * stream  # brought back whole: the block's own, and those ahead
        passing += ON_THEIR_WAY * stream if kept.offload else 0
        part = width * checkpoint_shape(model, setup).stored
        checkpoint, host = (0, model.layers * aligned(part)) if kept.offload else (part, 0)

    # Head and loss: the last norm, and the softmax in fp32.
    ending = norm_input + norm + stream
    widened = 4 if width < 4 else 0  # bytes a logit of the copy in fp32
    loss = max(width + widened + 4, 12) if ranks == 1 else width + 4  # divided logits (train.vocabulary) have one copy
    held_head = table if model.tied else 0  # autograd sums the gradients of a tied table before anyone sees them
    first = tokens * model.hidden if habits.embedding_dropout else 0  # its mask
    below = [first + number * checkpoint for number in range(model.layers + 1)]
    return ActivationBytes(
        saved=int(below[-1] + ending + 4 * logits),
        forward=(2 * stream, *(size + passing for size in below[1:])),
        loss=int(below[-1] + ending + loss * logits),
        backward=(
            max(stream + 2 * table, 3 * table) if model.tied else stream + table,  # a tied table's two, and their sum
            *(int(size + recomputed + stream + activation.backward_extra * mlp + held_head) for size in below[1:]),
        ),
        after_backward=(
            0,
            *(int(size + stream + held_head) for size in below[:-1]),
        ),
        host=host,
        early_root_gradients=0 if model.tied else table,
    )
