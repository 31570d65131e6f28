"""The built-in GPT as a task of the loop: bytes of a corpus, a model from its shape, samples from saved weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ...comm.process_group import start_process_group
from ...config.job import Job
from ...config.options import Config
from ...system.device import available_memory
from ...system.machine import usable_cores
from ..checkpoints import Origin
from ..rank import Rank
from ..record import Record
from ..task import mean, parameter_groups, shown
from ..views import closing_table
from .corpus import Batch, Corpus
from .model import GPT, sample
from .tensor_parallel import parallelise
from .weights import load_weights, save_weights

PROMPT = b"import "


class GPTTask:
    """Trains a GPT on the bytes of a corpus."""

    def __init__(self, job: Job, here: Rank) -> None:
        self._job, self._here = job, here
        self._corpus = Corpus.read(job.corpus)
        self._origin = Origin.of(job, here.data_ranks)

    @property
    def identity(self) -> dict[str, Any]:
        """Return nothing: the job's tables say all."""
        return {}

    def start(self, job: Job, origin: Origin | None, here: Rank) -> Job:
        """Take over how the run divided its data when it began."""
        assert origin is not None, "a GPT's batches depend on it"
        self._job, self._origin = job, origin
        return job

    @property
    def headline(self) -> str:
        """Return the sizes of the model, a step and the corpus."""
        job, here, corpus = self._job, self._here, self._corpus
        chosen = Config.parse(job.shard)
        offload = ", offload auto" if chosen.chooses_offload else "" if chosen.offload is None else ", offload cpu"
        if here.tensor_parallel > 1:
            offload += f", tensor parallel {here.tensor_parallel}"
        sizes = [here.data_ranks, *([job.train.micro_batches] if job.train.micro_batches > 1 else [])]
        step = " × ".join(map(str, [*sizes, job.train.batch, job.gpt.sequence]))
        return (
            f"{job.name}: {job.gpt.parameters / 1e6:,.1f}M parameters, {job.train.steps} steps of {step} bytes, "
            f"{job.precision}{offload}, {here.title}\n"
            f"corpus: {corpus.files:,} files, {len(corpus.training) / 1e6:.1f} MB to train on, "
            f"{len(corpus.held_out) / 1e6:.1f} MB held out"
        )

    @property
    def tokens_a_step(self) -> int:
        """Return the bytes of all ranks in one step."""
        train = self._job.train
        return self._here.data_ranks * train.micro_batches * train.batch * self._job.gpt.sequence

    def build(self) -> nn.Module:
        """Return the GPT on the meta device: no rank ever has it whole, `shard()` initialises it unit by unit."""
        with torch.device("meta"):
            gpt = GPT(self._job.built_model)
        here = self._here
        if here.tensor_parallel > 1:
            start_process_group(here.device)
            ranks = (here.data_ranks, here.tensor_parallel)
            parallelise(gpt, init_device_mesh(here.device.type, ranks, mesh_dim_names=("data", "model"))["model"])
        return gpt

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW with two groups."""
        train = self._job.train
        return torch.optim.AdamW(parameter_groups(model, train.weight_decay), lr=train.lr, betas=(0.9, 0.95))

    def shard_options(self) -> dict[str, Any]:
        """Return the job's options, and what differs from rank to rank."""
        return shard_options(self._job, self._here)

    def prepare(self, model: nn.Module) -> None:
        """Do nothing."""

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's windows of a step, in equal parts."""
        whole = self._corpus.training_share(
            of_ranks=self._origin.ranks,
            of_batch=self._origin.batch * self._origin.micro_batches,
            ranks=self._here.data_ranks,
            sequence=self._job.gpt.sequence,
            seed=self._job.train.seed,
            step=step,
            rank=self._here.data_rank,
        )
        parts = zip(*(part.split(self._job.train.batch) for part in (whole.tokens, whole.targets)), strict=True)
        return [Batch(*part).to(self._here.device) for part in parts]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of the windows, divided by the number of micro-batches."""
        found: Tensor = model(batch.tokens, batch.targets)
        return found if self._job.train.micro_batches == 1 else found / self._job.train.micro_batches

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the mean loss on held-out files. Every rank evaluates its part of them."""
        model.eval()
        train, here = self._job.train, self._here
        total = torch.zeros((), device=here.device)
        for batch in self._corpus.held_out_batches(
            batches=train.evaluate_batches,
            batch=train.batch,
            sequence=self._job.gpt.sequence,
            rank=here.data_rank,
            ranks=here.data_ranks,
        ):
            batch = batch.to(here.device)
            total += model(batch.tokens, batch.targets)
        model.train()
        return mean(model, total) / train.evaluate_batches

    def sample_sharded(self, model: nn.Module) -> None:
        """Return None: a GPT is sampled from its saved weights."""

    def save(self, model: nn.Module, out: Path) -> list[Path]:
        """Write weights and shape."""
        return save_weights(out, self._job.gpt, model)

    def sample_saved(self, out: Path, device: torch.device) -> str:
        """Return text that a plain, unsharded model samples from the saved weights."""
        train = self._job.train
        if not train.sample:
            return "no sample was asked for"
        if 5 * self._job.gpt.parameters > available_memory(device):
            return "no sample: the whole model is too large for one device"
        torch.set_num_threads(usable_cores())  # the other ranks have ended
        prompt = torch.tensor(list(PROMPT), device=device)
        tokens = sample(load_weights(out, device), prompt, train.sample, seed=train.seed).clamp(max=255)
        return "a sample from the saved weights:\n" + shown(bytes(tokens.tolist()).decode(errors="replace"))

    def closing(self, record: Record, out: Path) -> Sequence[RenderableType]:
        """Return the measurements beside the papers' formulas."""
        return [closing_table(record)]


def shard_options(job: Job, here: Rank) -> dict[str, Any]:
    """Return the options that this rank gives to `shard()`. Only the GPU differs from rank to rank.

    GPU memory is defragmented unless the job says otherwise.
    """
    example = torch.empty(job.train.batch, job.gpt.sequence, dtype=torch.long, device="meta")
    return {"defragment": here.device.type == "cuda", **job.shard, "device": here.device, "example": (example, example)}
