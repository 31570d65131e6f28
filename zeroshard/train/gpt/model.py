"""A plain GPT, as a user might write it: nothing in this file knows of sharding.

Pre-LN blocks, learned positions, GELU, scaled-dot-product attention. The blocks are in one `ModuleList`, where
zeroshard finds its units. Every module initialises its own parameters in `reset_parameters`, and no others. So a model
on the meta device can be initialised module by module.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...config.job import ModelConfig

INIT_STD = 0.02  # GPT-2's


class Linear(nn.Linear):
    """A linear layer with normal weights of a given standard deviation and zero bias."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = INIT_STD) -> None:
        self.std = std  # set first, because the constructor of nn.Linear initialises
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise weight and bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with the standard deviation of GPT-2. The 1 of nn.Embedding is too large for a tied head."""

    def reset_parameters(self) -> None:
        """Initialise the weight."""
        nn.init.normal_(self.weight, std=INIT_STD)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.hidden // config.heads
        self.qkv = Linear(config.hidden, 3 * config.hidden)
        self.out = Linear(config.hidden, config.hidden, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden], as the result
        """Mix each position with the positions before it."""
        batch, sequence, _ = x.shape
        # The rows are ordered by head: query, key, value. So tensor parallelism, which divides rows, divides heads.
        qkv = self.qkv(x).view(batch, sequence, -1, 3, self.head_width)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind()  # each [batch, heads, sequence, hidden / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return projected


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, 4 * config.hidden)
        self.down = Linear(4 * config.hidden, config.hidden, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden], as the result
        """Transform each position by itself."""
        projected: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return projected


class Block(nn.Module):
    """One pre-LN transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden], as the result
        """Add attention, then MLP, to the residual stream."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class TiedHead(nn.Module):
    """The transposed token embedding. It has no parameter, but as a module it can have hooks."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # [batch, sequence, hidden], [vocabulary, hidden]
        """Return the logits."""
        return F.linear(x, weight)


class Loss(nn.Module):
    """Mean cross-entropy. It is a module so that tensor parallelism can replace it by the loss of divided logits."""

    def forward(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        """Return the loss, or the logits if there are no targets."""
        if targets is None:
            return logits
        # In fp32, because a 16-bit softmax loses small probabilities.
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class GPT(nn.Module):
    """Token and position embeddings, blocks, a final norm and a head.

    >>> model = GPT(ModelConfig(layers=2, hidden=32, heads=2, sequence=16))
    >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
    torch.Size([3, 16, 256])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocabulary, config.hidden)
        self.positions = Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = TiedHead() if config.tied else Linear(config.hidden, config.vocabulary, bias=False)
        self.loss: nn.Module = Loss()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: [batch, sequence] of integers.
            targets: [batch, sequence], the token that followed each.

        Returns:
            The mean cross-entropy in nats where there are targets, otherwise the logits [batch, sequence, vocabulary].
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            if self.config.checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x, self.tokens.weight) if self.config.tied else self.head(x)
        result: Tensor = self.loss(logits, targets)
        return result


@torch.no_grad()
def sample(model: GPT, prompt: Tensor, length: int, *, temperature: float = 0.8, seed: int = 0) -> Tensor:
    """Continue a prompt token by token.

    Args:
        model: a whole model on one device.
        prompt: [sequence] of integers, at least one.
        length: how many tokens to add.
        temperature: a value below 1 prefers likely tokens.
        seed: the same seed gives the same text.

    Returns:
        [sequence + length], the prompt first.
    """
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    text = prompt
    for _ in range(length):
        logits = model(text[None, -model.config.sequence :])[0, -1, :].float()
        following = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
        text = torch.cat([text, following])
    return text


def _residual_std(config: ModelConfig) -> float:
    # Each block adds twice to the residual stream. This scale makes the variance independent of the depth (GPT-2).
    return INIT_STD / math.sqrt(2 * config.layers)
