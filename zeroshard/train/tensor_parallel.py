"""The built-in GPT under PyTorch's tensor parallelism: a plan as any user writes one, nothing of zeroshard's own.

It is Megatron's: of attention and MLP, the first matrix is divided by columns and the second by rows, so that each
block adds up twice over the ranks; embedding, head and the loss's logits are divided by vocabulary. Norms and positions
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

from .gpt import GPT
from .vocabulary import DividedLoss

PLAN: dict[str, ParallelStyle] = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.attention.qkv": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.mlp.up": ColwiseParallel(),
    "blocks.*.mlp.down": RowwiseParallel(),
}


def parallelise(model: GPT, mesh: DeviceMesh) -> None:
    """Divide a GPT's matrices among the ranks of a one-dimensional mesh; its parameters become DTensors.

    Raises:
        ValueError: if the ranks do not divide the heads.
    """
    heads, degree = model.config.heads, mesh.size()
    if heads % degree:
        raise ValueError(f"tensor parallelism of {degree} does not divide the {heads} heads; use a divisor of them")
    parallelize_module(model, mesh, PLAN)
    if model.config.tied:  # its weight is the embedding's, so it has none of its own to be divided
        whole = (Replicate(), None)
        parallelize_module(model.head, mesh, PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole))
    else:
        parallelize_module(model.head, mesh, ColwiseParallel(use_local_output=False))
    model.loss = DividedLoss()
