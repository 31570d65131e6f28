"""Trains a small language model on bytes, under torchrun, on any number of nodes. It saves and ends when it is told to.

torchrun --nproc-per-node 2 examples/cluster/train.py --out runs/bytes
sbatch --nodes 4 examples/cluster/train.sbatch examples/cluster/train.py --out /shared/run

Started again with the same command, it goes on where it was. Needs no files.
"""

import argparse
import signal
from pathlib import Path
from pydoc_data.topics import topics  # the reference, as every Python brings it

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--report-every", type=int, default=10)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--out", type=Path, default="run", help="a folder that all nodes see")
args = parser.parse_args()

told_to_stop = False


def note(number: int, frame: object) -> None:
    """Notes the signal. What a step does is not to be broken off."""
    global told_to_stop
    told_to_stop = True


signal.signal(signal.SIGTERM, note)


class LanguageModel(nn.Module):
    def __init__(self, hidden: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, hidden), nn.Embedding(args.sequence, hidden)
        blocks = (nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, 0.0, batch_first=True) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(x)


torch.manual_seed(1337)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = zeroshard.shard(model, optimizer, stage=3, clip_grad_norm=1.0)
rank, world, device = dist.get_rank(), dist.get_world_size(), model.tokens.weight.device

saved = args.out / "checkpoints"
done = 0
if any(saved.glob("step-*")):
    done = zeroshard.load(saved, model, optimizer)["step"]  # the newest that is complete
    if rank == 0:
        print(f"goes on after step {done}", flush=True)

data = torch.tensor(list("\n".join(topics.values()).encode()))
for step in range(done + 1, args.steps + 1):
    generator = torch.Generator().manual_seed(step * world + rank)  # other windows on every rank and in every step
    starts = torch.randint(len(data) - args.sequence - 1, (args.batch,), generator=generator).tolist()
    windows = torch.stack([data[start : start + args.sequence + 1] for start in starts]).to(device)
    loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    if step % args.report_every == 0 and rank == 0:
        print(f"step {step}: loss {loss.item():.7f}", flush=True)
    # The signal reaches each rank at another moment, so all ranks stop if one was told to.
    stop = torch.tensor(int(told_to_stop), device=device)
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if step % args.save_every == 0 or step == args.steps or stop:
        zeroshard.save(saved / f"step-{step}", model, optimizer, extra={"step": step}, keep=2)
    if stop:
        if rank == 0:
            print(f"stopped after step {step}", flush=True)
        break
else:
    if weights := zeroshard.full_state_dict(model, rank=0):  # empty on the others
        torch.save(weights, args.out / "weights.pt")
dist.destroy_process_group()
