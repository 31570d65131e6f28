"""Trains a small model of the next byte, on the bytes of Python's standard library, with DeepSpeed.

torchrun --nproc-per-node 2 examples/deepspeed/train.py
"""

import argparse
import os
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--report-every", type=int, default=10)
parser.add_argument("--context", type=int, default=32)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--out", default="runs/deepspeed")
parser = deepspeed.add_config_arguments(parser)
parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
args = parser.parse_args()

VOCABULARY = 256  # bytes
torch.manual_seed(1337)


class Block(nn.Module):
    """Two layers around a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(args.hidden)
        self.up = nn.Linear(args.hidden, 4 * args.hidden)
        self.down = nn.Linear(4 * args.hidden, args.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, hidden] to the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextByte(nn.Module):
    """Predicts a byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, args.hidden // 8)
        self.mix = nn.Linear(args.context * (args.hidden // 8), args.hidden)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.last = nn.Linear(args.hidden, VOCABULARY)

    def forward(self, context: Tensor) -> Tensor:
        """[batch, context] of bytes to [batch, VOCABULARY] of logits."""
        x = self.mix(self.bytes(context).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


deepspeed.init_distributed()
model = NextByte()
engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)
chosen = torch.Generator().manual_seed(engine.global_rank)  # other bytes on every rank

while engine.global_steps < args.steps:
    starts = torch.randint(len(text) - args.context - 1, (engine.train_micro_batch_size_per_gpu(),), generator=chosen)
    windows = (
        torch.stack([text[start : start + args.context + 1] for start in starts.tolist()]).long().to(engine.device)
    )
    loss = F.cross_entropy(engine(windows[:, :-1]), windows[:, -1])
    engine.backward(loss)
    report = engine.is_gradient_accumulation_boundary() and (engine.global_steps + 1) % args.report_every == 0
    engine.step()
    if report and engine.global_rank == 0:
        print(f"step {engine.global_steps}: loss {loss.item():.7f}")

engine.save_checkpoint(args.out, client_state={"bytes": len(text)})
engine.save_16bit_model(args.out, "weights.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
