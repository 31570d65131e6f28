"""Bytes of activations: by the papers' formula, and for a transformer operation by operation.

The count follows torch as it runs a decoder with fused attention. A tensor counts as long as autograd or the module
that made the tensor refers to it. Model parallelism divides the tensors inside attention and MLP, and the logits. The
residual stream stays whole. A checkpoint is whole too, unless checkpoints are divided (P_a) or on the host (P_a+cpu).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..config.bounds import ON_THEIR_WAY
from ..offload.pinned import aligned
from ..recompute.part import part_of
from .shape import Setup, Transformer

PAPER_TENSORS = 12
"""Tensors of batch · sequence · hidden elements that a block saves for backward, by ZeRO's estimate (section 3.2)."""


def paper_activations(model: Transformer, setup: Setup, *, divided: bool = False) -> float:
    """Bytes by ZeRO's estimate: 12 · hidden · batch · sequence · layers elements.

    With checkpointing 1 takes the place of 12. ``divided``: the model-parallel ranks divide checkpoints (P_a).
    """
    tensors = 1 if setup.checkpointing else PAPER_TENSORS
    ranks = setup.model_parallel if divided else 1
    return setup.width * tensors * model.hidden * setup.batch * setup.sequence * model.layers / ranks


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations that are alive in one micro-batch.

    A tuple has one entry for the root, and then one for each block.
    """

    saved: int
    """All that forward saves for backward."""
    forward: tuple[int, ...]
    """The maximum while the forward of a block runs, with everything that earlier blocks saved."""
    loss: int
    """The maximum between the forward of the last block and the backward of that block."""
    backward: tuple[int, ...]
    """The maximum while the backward of a block runs."""
    after_backward: tuple[int, ...]
    """The bytes at the moment when the last gradient of a block has arrived."""
    host: int = 0
    """The maximum of host memory for checkpoints."""
    early_root_gradients: int = 0
    """Gradients of the root that arrive before those of the blocks. They wait for the root's other gradients."""


class CheckpointShape(NamedTuple):
    """Elements of one block's checkpoint."""

    stored: int
    """What one rank stores: the maximum over the ranks."""
    gathered: int
    """What model-parallel ranks gather to restore the checkpoint (P_a), with padding."""


def checkpoint_shape(model: Transformer, setup: Setup) -> CheckpointShape:
    """The size of a checkpoint: the tensor that one block gives to the next.

    >>> from ..config.options import Activations
    >>> gpt = Transformer(layers=2, hidden=64, heads=4, vocabulary=256)
    >>> setup = Setup(stage=2, model_parallel=4, sequence=15, activations=Activations(partition=True))
    >>> checkpoint_shape(gpt, setup)
    CheckpointShape(stored=256, gathered=1024)
    """
    whole, options = setup.batch * setup.sequence * model.hidden, setup.activations
    ranks = setup.model_parallel if options is not None and options.partition else 1
    part = part_of(whole, ranks)
    return CheckpointShape(min(part, whole), ranks * part if ranks > 1 else 0)


def transformer_activations(model: Transformer, setup: Setup) -> ActivationBytes:
    """The activations of one micro-batch on one rank."""
    width, ranks = setup.width, setup.model_parallel
    tokens = setup.batch * setup.sequence
    stream = tokens * model.hidden * width  # one tensor of the residual stream
    inside = tokens * width / ranks  # one element a token of a tensor that model parallelism divides
    logits = tokens * model.vocabulary / ranks  # elements
    table = int(model.vocabulary * model.hidden * width / ranks)  # the embedding's gradient

    mlp, attention = model.mlp_width * inside, 2 * (model.query_width + model.kv_width) * inside
    row_sums = 4 * setup.batch * setup.sequence * model.heads / ranks  # of attention, in fp32
    habits, activation = model.habits, model.activation
    copies = (habits.copies if setup.checkpointing else habits.cached_copies) * model.query_width * inside
    masks = habits.dropouts * tokens * model.hidden
    if model.biases:  # LayerNorm saves its input, and mean and deviation in fp32
        norm_input, norm = stream, 8 * tokens
    else:  # RMSNorm, as most models write it, saves an fp32 copy of its input, its scale and the normalised values
        norm_input, norm = 0, 4 * tokens * model.hidden + 4 * tokens + stream
    if model.head_norms:  # these are RMSNorms
        heads = model.heads + (model.kv_heads or model.heads)
        attention += tokens * (model.normed_width * (4 + width) + 4 * heads) / ranks
    # A block saves: queries, keys, values and the result of attention; what norms save, and their outputs; in the MLP
    # the input and output of its activation, and with a gate also the gate's partner and the product of the two.
    block = int(attention + copies + row_sums + masks + 2 * (norm_input + norm + stream) + activation.saved * mlp)
    if habits.one_input:
        block -= norm_input
    checkpoint = stream if setup.checkpointing else block
    recomputed = block - norm_input if setup.checkpointing else 0  # the block's input is the checkpoint
    passing = int(2 * stream + activation.forward_peak * mlp) if setup.checkpointing else 2 * stream
    options, host = setup.activations, 0
    if setup.checkpointing and options is not None and (options.partition or options.offload):
        recomputed += (1 + options.prefetch) * stream  # whole again: this block's checkpoint and the prefetched ones
        passing += ON_THEIR_WAY * stream if options.offload else 0
        part = width * checkpoint_shape(model, setup).stored
        checkpoint, host = (0, model.layers * aligned(part)) if options.offload else (part, 0)

    # Head and loss: the last norm, and a softmax in fp32.
    ending = norm_input + norm + stream
    widened = 4 if width < 4 else 0  # bytes a logit of an fp32 copy
    # Divided logits (train/vocabulary.py) have one copy.
    loss = max(width + widened + 4, 12) if ranks == 1 else width + 4
    early_table = table if model.tied else 0  # autograd waits for both gradients of a tied table and adds them
    first = tokens * model.hidden if habits.embedding_dropout else 0  # the mask of that dropout
    below = [first + number * checkpoint for number in range(model.layers + 1)]
    return ActivationBytes(
        saved=int(below[-1] + ending + 4 * logits),
        forward=(2 * stream, *(size + passing for size in below[1:])),
        loss=int(below[-1] + ending + loss * logits),
        backward=(
            # A tied table has two gradients, and their sum.
            max(stream + 2 * table, 3 * table) if model.tied else stream + table,
            *(int(size + recomputed + stream + activation.backward_extra * mlp + early_table) for size in below[1:]),
        ),
        after_backward=(
            0,
            *(int(size + stream + early_table) for size in below[:-1]),
        ),
        host=host,
        early_root_gradients=0 if model.tied else table,
    )
