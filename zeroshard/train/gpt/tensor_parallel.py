"""The built-in GPT under the tensor parallelism of PyTorch, with a plan such as a user would write.

The plan is that of Megatron. In attention and in the MLP, the first matrix is divided by columns and the second by
rows, so that each block has two all-reduces. Embedding, head and logits are divided by vocabulary. Norms and positions
stay whole.
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from .model import GPT
from .vocabulary import DividedLoss, PartOfLoss

PLAN: dict[str, ParallelStyle] = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.attention.qkv": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.mlp.up": ColwiseParallel(),
    "blocks.*.mlp.down": RowwiseParallel(),
}


def styles(*, tied: bool) -> dict[str, str]:
    """Return how each module is divided, in words, for the plan: "colwise" or "rowwise"."""
    found = {name: "colwise" if isinstance(style, ColwiseParallel) else "rowwise" for name, style in PLAN.items()}
    return found if tied else found | {"head": "colwise"}


def parallelise(model: GPT, mesh: DeviceMesh) -> None:
    """Divide a GPT's matrices among the ranks of a one-dimensional mesh; its parameters become DTensors.

    Raises:
        ValueError: if the ranks do not divide the heads.
    """
    heads, degree = model.config.heads, mesh.size()
    if heads % degree:
        raise ValueError(f"tensor parallelism of {degree} does not divide the {heads} heads; use a divisor of them")
    parallelize_module(model, mesh, PLAN)
    if model.config.tied:  # the head uses the weight of the embedding, and has none of its own to divide
        whole = (Replicate(), None)
        parallelize_module(model.head, mesh, PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole))
    else:
        parallelize_module(model.head, mesh, ColwiseParallel(use_local_output=False))
    model.loss = DividedLoss()


def expect_divided_logits(model: GPT) -> None:
    """Let a GPT that has one rank's part compute that rank's part of the loss, without other ranks. For the plan."""
    model.loss = PartOfLoss()
