"""The models and data of the loops: small, and with blocks, so that there are units."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Net

VOCABULARY = 29
LENGTH = 8


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.attn(self.ln_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A small GPT in the style of nanoGPT, with tied embeddings."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(2 * LENGTH, width)
        self.h = nn.ModuleList(GPTBlock(width) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))

    @torch.no_grad()
    def generate(self, tokens: Tensor, new_tokens: int) -> Tensor:
        for _ in range(new_tokens):
            logits, _ = self(tokens)
            following = torch.multinomial(F.softmax(logits[:, -1], dim=-1), 1)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens


class Heads(nn.Module):
    """A trunk with three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Net(depth=2, outputs=8)
        self.heads = nn.ModuleDict({"class": nn.Linear(8, 4), "box": nn.Linear(8, 2), "score": nn.Linear(8, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.relu(self.trunk(x))
        return {name: head(features) for name, head in self.heads.items()}


def sentences(step: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them: others for every step and rank."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def examples(step: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    """Inputs of a ``Net`` and values to predict: others for every step and rank."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * step + dist.get_rank())
    return torch.randn(rows, 7, generator=generator), torch.randn(rows, 5, generator=generator)
