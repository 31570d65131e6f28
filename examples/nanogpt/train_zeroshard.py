"""Trains a small GPT on the bytes of Python's standard library: model, data and loop in one file.

torchrun --nproc-per-node 2 examples/nanogpt/train_zeroshard.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--report-every", type=int, default=10)
parser.add_argument("--out", default="nanogpt.pt")
args = parser.parse_args()

VOCABULARY = 256  # bytes
device = "cuda" if torch.cuda.is_available() else "cpu"
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(1337 + rank)  # other windows on every rank; the first parameters are rank 0's


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(args.hidden, 3 * args.hidden)
        self.out = nn.Linear(args.hidden, args.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        heads = (t.unflatten(-1, (args.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(args.hidden), Attention()
        self.norm2 = nn.LayerNorm(args.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(args.hidden, 4 * args.hidden), nn.GELU(), nn.Linear(4 * args.hidden, args.hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Embeddings, blocks, and a head tied to the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.hidden)
        self.positions = nn.Embedding(args.sequence, args.hidden)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.head = nn.Linear(args.hidden, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the next byte; [batch, sequence] each."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def next_batch() -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the same one byte further on."""
    starts = torch.randint(len(text) - args.sequence - 1, (args.batch,)).tolist()
    windows = torch.stack([text[start : start + args.sequence + 1] for start in starts]).long().to(device)
    return windows[:, :-1], windows[:, 1:]


sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
model, optimizer = zeroshard.shard(model, optimizer, stage=3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

for step in range(1, args.steps + 1):
    tokens, targets = next_batch()
    loss = model(tokens, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % args.report_every == 0 and rank == 0:
        print(f"step {step}: loss {loss.item():.7f}")

if weights := zeroshard.full_state_dict(model, rank=0):  # empty on the others
    torch.save(weights, args.out)
