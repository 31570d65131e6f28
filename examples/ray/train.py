"""Trains a small language model on bytes with Ray Train, and goes on when a worker dies. Needs no files.

python examples/ray/train.py
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from pydoc_data.topics import topics  # the reference, as every Python brings it

import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import Tensor, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--report-every", type=int, default=10)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--die-at", type=int, help="kill a worker before this step, once, to see that the run goes on")
parser.add_argument("--out", default="weights.pt")


class LanguageModel(nn.Module):
    def __init__(self, sequence: int, hidden: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, hidden), nn.Embedding(sequence, hidden)
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


def train(config: dict) -> None:
    """Runs on every worker, and again on new workers after a failure."""
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    torch.manual_seed(1337)
    model = LanguageModel(config["sequence"])
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = None
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            progress = torch.load(Path(folder, "state.pt"))
        model.module.load_state_dict(progress.pop("model"))
        optimizer.load_state_dict(progress.pop("optimizer"))
    losses = progress["losses"] if progress else []
    if losses and rank == 0:
        print(f"goes on after step {len(losses)}", flush=True)

    data = torch.tensor(list("\n".join(topics.values()).encode()))
    for step in range(len(losses) + 1, config["steps"] + 1):
        if step == config["die_at"] and rank == world - 1 and not progress:
            ray.train.get_all_reported_checkpoints()  # waits until Ray has noted them
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step * world + rank)
        starts = torch.randint(len(data) - config["sequence"] - 1, (config["batch"],), generator=generator).tolist()
        windows = torch.stack([data[s : s + config["sequence"] + 1] for s in starts]).to(get_device())
        loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % config["save_every"] == 0 or step == config["steps"]:
            with tempfile.TemporaryDirectory() as folder:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
                torch.save(state, Path(folder, "state.pt"))
                ray.train.report({"losses": losses}, Checkpoint.from_directory(folder) if rank == 0 else None)
    weights = model.module.state_dict()
    if rank == 0:
        torch.save(weights, config["out"])


if __name__ == "__main__":
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(args), "out": os.path.abspath(args.out)},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=gpu),
        run_config=RunConfig(
            storage_path=os.path.abspath(f"{args.out}.runs"),  # with several nodes: a folder that all of them see
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    for step, loss in enumerate(result.metrics["losses"], 1):
        if step % args.report_every == 0:
            print(f"step {step}: loss {loss:.7f}")
