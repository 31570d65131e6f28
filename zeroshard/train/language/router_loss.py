"""The auxiliary loss of a mixture of experts, by which its router learns to use all experts alike.

A model has one where its configuration says `output_router_logits`. transformers adds it to a loss that is a mean, so
here it has the same weight beside the step's mean loss. Each micro-batch has its own, as it has in transformers, and
the step has their mean.
"""

import torch
from torch import nn

from ...runtime import runtime_of
from .model import LanguageModel

NAMES = ("router_aux_loss_coef", "aux_loss_coef")
"""How the models of transformers call the weight."""


@torch.no_grad()
def router_weight(model: nn.Module, source: LanguageModel, device: torch.device) -> float:
    """Return the weight of the model's auxiliary loss; 0 if it has none. Every rank calls this.

    Raises:
        ValueError: the model has an auxiliary loss, and no weight for it.
    """
    tokens = torch.arange(2, device=device)[None]
    has_one = getattr(model(**source.inputs(tokens)), "aux_loss", None) is not None
    if not runtime_of(model).fabric.from_rank_zero(has_one):
        return 0.0
    for owner in (model, source.settings.get_text_config()):
        for name in NAMES:
            weight = getattr(owner, name, None)
            if isinstance(weight, int | float):
                return float(weight)
    raise ValueError(
        f"model {source.folder}: output_router_logits gives it an auxiliary loss, and none of {', '.join(NAMES)} says "
        'how much it counts; write "output_router_logits": false into its config.json to train without'
    )
