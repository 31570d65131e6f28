"""Fine-tuning as a task of the loop: a Hugging Face model, packed documents, loss on the tokens that are learned.

A step is a fixed list of sequences. Ranks and micro-batches only divide the list, and the loss is the mean over the
learned tokens of the whole step, whose number every rank knows from the data. So results do not depend on the hardware,
beyond rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import RenderableType
from torch import Tensor, nn

from ...comm.process_group import start_process_group
from ...config.job import Job
from ...plan.room import Room, least, room_of
from ...runtime import runtime_of
from ...system.device import device_ranks, local_ranks
from ..checkpoints import Origin
from ..rank import Rank
from ..record import Record
from ..task import mean, parameter_groups, shown
from .dataset import Dataset, read_dataset, remove_stored
from .encoding import Encoder
from .forecast import Forecast, forecast
from .model import LanguageModel
from .packing import Order, Packed, Sequences, divide
from .router_loss import router_weight
from .token_loss import summed_loss
from .views import closing_lines, plan_table
from .weights import folder_of, save_language_model

PROBED = 8
"""Tokens of the two sequences that show whether attention crosses from one document to another."""
SAME = 1e-6
"""A larger relative difference of logits means that it does."""
FEW_STEPS = 4
"""If the data fill less than one step, the steps that the proposed size of a step would make at least."""


class MicroBatch(NamedTuple):
    """Some sequences of a step."""

    packed: Packed
    learned: int
    """The tokens that the whole step learns."""
    share: float
    """The part of the step's sequences that are here."""


class LanguageTask:
    """Trains a causal language model, or adapters beside it."""

    def __init__(self, job: Job, out: Path, here: Rank) -> None:
        self._job, self._here = job, here
        self._model = LanguageModel(job.language_model)
        self._model.check()
        self._sequence = self._model.sequence(job.files.sequence)
        self._data = read_data(job, self._model, out)
        self._order = Order(len(self._data.training), self._sequences_a_step, job.train.seed)
        self._forecast: Forecast | None = None
        self._isolated = self._computes_loss = True
        self._router_weight = 0.0
        self._sizes = (0, 0)

    @property
    def _sequences_a_step(self) -> int:
        return sequences_a_step(self._job, self._sequence)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the fingerprint of the tokens: their order is the run's position."""
        return identity_of(self._data)

    def start(self, job: Job, origin: Origin | None, here: Rank) -> Job:
        """Ask the plan how to run the job here. Returns the job with its steps and its micro-batch."""
        self._told_first = less_than_a_step(job, self._data, self._sequence)
        self._job = settled_steps(job, self._data, self._sequence)
        start_process_group(here.device)
        stored = _gathered(self._data.stored, here.world)
        if here.rank == 0 and self._data.stored is not None:
            remove_stored(self._data.stored.parent, stored)
        planned = self.build()
        local = local_ranks(here.world)
        sharing = device_ranks(here.device, local, lambda mine: _gathered(mine, here.world))
        rooms = _gathered(room_of(planned, here.device, local_ranks=local, device_ranks=sharing), here.world)
        if here.rank == 0:
            self._forecast = plan_of(
                self._job,
                self._model,
                planned,
                self.optimizer(planned),
                least(rooms),
                here.world,
                self._sequence,
            )
        found = self._forecast
        chosen = (found.stage, found.offload, found.batch, found.told, found.fits) if found is not None else None
        stage, offload, batch, self._told, fits = _from_rank_zero(chosen, here.world)
        if not fits and "auto" in (job.shard.get("stage"), job.shard.get("offload")):
            raise ValueError(self._told)
        self._sizes = sizes_of(planned)
        options = {name: value for name, value in job.shard.items() if name not in ("stage", "offload")}
        self._options = {**options, "stage": stage, "offload": offload}
        self._job = replace(self._job, train=replace(self._job.train, batch=batch))
        return self._job

    @property
    def headline(self) -> str:
        """Return the sizes of the model, the data and a step, and what the plan chose."""
        lines = headline(self._job, self._model, self._data, self._sizes, self._sequence)
        return "\n".join([*lines, *self._told_first, self._told])

    @property
    def tokens_a_step(self) -> int:
        """Return the tokens of all ranks in one step, with padding."""
        return self._sequences_a_step * self._sequence

    def build(self) -> nn.Module:
        """Return the model on the meta device."""
        return self._model.build(self._job.train.seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW with two groups, of what is trained."""
        return optimizer_of(self._job, model)

    def shard_options(self) -> dict[str, Any]:
        """Return the options that the plan chose, and where the weights are."""
        on_gpu = self._here.device.type == "cuda"
        return {
            "defragment": on_gpu,
            **self._options,
            "device": self._here.device,
            "example": self._model.example(self._job.train.batch, self._sequence),
            "weights": self._model.folder,
        }

    def prepare(self, model: nn.Module) -> None:
        """Find out whether the model keeps documents of a sequence apart, and computes the loss that it is given."""
        self._router_weight = router_weight(model, self._model, self._here.device)
        self._computes_loss = not self._router_weight and computes_loss(model, self._model, self._here.device)
        self._isolated = keeps_apart(model, self._model, self._here.device, self._job.train.batch)
        if not self._isolated and self._here.rank == 0:
            print("this model cannot tell packed documents apart: attention crosses from one to the next", flush=True)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return this rank's sequences of a step."""
        return self._divided(self._data.training, self._order.step(step))

    def _divided(self, data: Sequences, numbers: Sequence[int]) -> list[MicroBatch]:
        here, learned = self._here, data.learned(numbers)
        found = []
        for part in divide(numbers, here.data_rank, here.data_ranks, self._job.train.batch):
            share = sum(number is not None for number in part) / len(numbers)
            found.append(MicroBatch(self._positioned(data.take(part)).to(here.device), learned, share))
        return found

    def _positioned(self, batch: Packed) -> Packed:
        if self._isolated:
            return batch
        return Packed(batch.tokens, batch.targets, torch.arange(self._sequence).expand_as(batch.positions))

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Return the micro-batch's part of the mean loss over the step's learned tokens, times the ranks."""
        loss, found = self._token_loss(model, batch)
        if self._router_weight:
            loss = loss + found.aux_loss * (self._router_weight * batch.share * self._here.data_ranks)
        return loss

    def _token_loss(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Any]:
        """Return the loss of the tokens alone, and all that the model returned."""
        given = self._model.inputs(batch.packed.tokens, batch.packed.positions)
        if self._computes_loss:
            found = model(**given, labels=batch.packed.targets)
            summed: Tensor = found.loss
        else:
            found = model(**given)
            summed = summed_loss(found.logits, batch.packed.targets)
        return summed * (self._here.data_ranks / batch.learned), found

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float | None:
        """Return the mean loss over the learned tokens of some held-out sequences, always the same."""
        data = self._data.held_out
        if data is None:
            return None
        count = min(len(data), self._job.train.evaluate_batches * self._sequences_a_step)
        numbers = [place * len(data) // count for place in range(count)]
        model.eval()
        total = torch.zeros((), device=self._here.device)
        for batch in self._divided(data, numbers):
            total += self._token_loss(model, batch)[0]
        model.train()
        return mean(model, total)

    @torch.no_grad()
    def sample_sharded(self, model: nn.Module) -> str | None:
        """Return what the model says after the beginning of a held-out document: the likeliest token each time.

        All ranks compute the same text together, so it does not matter whether the model fits one device.
        """
        if not self._job.train.sample:
            return None
        fabric, tokenizer = runtime_of(model).fabric, self._model.tokenizer
        model.eval()
        tokens, prompt = list(self._data.prompt), len(self._data.prompt)
        for _ in range(min(self._job.train.sample, self._sequence - prompt)):
            given = torch.tensor([tokens], device=self._here.device)
            logits = model(**self._model.inputs(given)).logits[0, -1]
            tokens.append(int(fabric.from_rank_zero(int(logits.argmax()))))
            if tokens[-1] == tokenizer.eos_token_id:
                break
        model.train()
        asked, said = (tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:prompt], tokens[prompt:]))
        return f"{shown(asked)}\n  →\n{shown(said) or '    (nothing)'}"

    def save(self, model: nn.Module, out: Path) -> list[Path]:
        """Write a folder that transformers loads, or PEFT."""
        return save_language_model(out, model, self._model, self._job)

    def sample_saved(self, out: Path, device: torch.device) -> None:
        """Return None: the sharded model was sampled."""

    def closing(self, record: Record, out: Path) -> Sequence[RenderableType]:
        """Return the measurements beside the plan, and how the result is loaded."""
        assert self._forecast is not None, "rank 0 has it"
        lines = closing_lines(folder_of(out, self._job), lora=bool(self._job.language_model.lora))
        return [plan_table(record, self._forecast, self._here.device), *lines]


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a job."""
    return torch.optim.AdamW(parameter_groups(model, job.train.weight_decay), lr=job.train.lr)


def read_data(job: Job, model: LanguageModel, out: Path | None) -> Dataset:
    """Return the job's data as tokens. They are stored in `out` for the next process that asks; None stores nothing."""
    encoder = Encoder(model.tokenizer, model.vocabulary)
    cache = None if out is None else out / "cache"
    key = [*model.tokenizer_key, str(model.vocabulary)]
    return read_dataset(job.files, model.sequence(job.files.sequence), job.train.seed, encoder, cache, key)


def identity_of(data: Dataset) -> dict[str, Any]:
    """Return what runs have in common that train on the same tokens."""
    return {"content of data.files": data.digest[:16]}


def sequences_a_step(job: Job, sequence: int) -> int:
    """Return how many sequences all ranks train on in a step.

    Raises:
        ValueError: not even one.
    """
    found = job.finetune.tokens_per_step // sequence
    if not found:
        raise ValueError(
            f"train.tokens_per_step: {job.finetune.tokens_per_step} is less than one sequence of {sequence} tokens; "
            "say more, or a shorter data.sequence"
        )
    return found


def settled_steps(job: Job, data: Dataset, sequence: int) -> Job:
    """Return the job with the number of its steps."""
    if job.train.steps:
        return job
    whole = (job.finetune.epochs or 1.0) * len(data.training)
    steps = max(1, math.ceil(whole / sequences_a_step(job, sequence)))
    return replace(job, train=replace(job.train, steps=steps))


def less_than_a_step(job: Job, data: Dataset, sequence: int) -> list[str]:
    """Return a warning if all epochs of the data fill less than one step, unless the job names its steps."""
    wanted = sequences_a_step(job, sequence)
    there = math.ceil((job.finetune.epochs or 1.0) * len(data.training))
    if job.train.steps or there >= wanted:
        return []
    better = max(1, there // FEW_STEPS) * sequence
    remedy = f"--tokens-per-step {better}" if there > 1 else f"--tokens-per-step {better}, and more --epochs"
    return [
        f"warning: the data fill less than one step ({there * sequence:,} of {wanted * sequence:,} tokens),",
        f"  so all epochs together make 1 step; take {remedy}",
    ]


def plan_of(
    job: Job,
    source: LanguageModel,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    room: Room,
    ranks: int,
    sequence: int,
) -> Forecast:
    """Return what the plan chooses for a job."""
    return forecast(
        model,
        optimizer,
        job.shard,
        room,
        lambda batch: source.example(batch, sequence),
        ranks=ranks,
        sequences=-(-sequences_a_step(job, sequence) // ranks),
        sequence=sequence,
        most=job.train.batch,
    )


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Return how many parameters a model has, and how many of them are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def headline(job: Job, model: LanguageModel, data: Dataset, sizes: tuple[int, int], sequence: int) -> list[str]:
    """Return lines that say what is trained, and on what."""
    whole, learned = sizes
    adapters = f", of which {learned / 1e6:,.2f}M in adapters of rank {model.config.lora} are trained"
    adapters = adapters if model.config.lora else ""
    trained, held_out = data.documents
    sides = f"{trained:,} document(s) to train on, {held_out:,} held out"
    skipped = f", {data.skipped:,} skipped that have nothing to predict" if data.skipped else ""
    skipped += f", {data.cut:,} cut that are longer than a sequence" if data.cut else ""
    sequences = sequences_a_step(job, sequence)
    none = "" if data.held_out is not None else "; none is held out, so nothing is evaluated"
    steps = "1 step" if job.train.steps == 1 else f"{job.train.steps:,} steps"
    return [
        f"{model.folder.name}: {whole / 1e6:,.2f}M parameters{adapters}, {job.precision}",
        f"data: {sides}{skipped}, {data.tokens:,} tokens in {len(data.training):,} sequences of {sequence}{none}",
        f"{steps} of {sequences} × {sequence} tokens, lr {job.train.lr:g}",
    ]


@torch.no_grad()
def keeps_apart(model: nn.Module, source: LanguageModel, device: torch.device, batch: int) -> bool:
    """Return whether a document's logits do not depend on the document before it. Every rank calls this.

    Positions that begin again tell documents apart, in the models of transformers whose attention uses them. Some
    attention does so only in a `batch` of one sequence.
    """
    rows = min(2, batch)
    half, vocabulary = PROBED // 2, source.vocabulary
    tokens = torch.arange(PROBED).remainder(vocabulary)
    others = torch.cat([(tokens[:half] + 1).flip(0).remainder(vocabulary), tokens[half:]])
    positions = torch.arange(half).repeat(2).repeat(rows, 1).to(device)
    training = model.training
    model.eval()
    seen, other = (
        model(**source.inputs(given.repeat(rows, 1).to(device), positions)).logits.view(rows, PROBED, -1)[:, half:]
        for given in (tokens, others)
    )
    model.train(training)
    allowed = max(SAME, torch.finfo(seen.dtype).eps / 4) * seen.abs().max()
    apart = bool((seen - other).abs().max() <= allowed)
    return bool(runtime_of(model).fabric.from_rank_zero(apart))


@torch.no_grad()
def computes_loss(model: nn.Module, source: LanguageModel, device: torch.device) -> bool:
    """Return whether the model's own loss is the sum over targets, as `LanguageModel.build` sets it.

    Some models compute another loss, whatever is set. Every rank calls this.
    """
    tokens = torch.arange(PROBED, device=device).remainder(source.vocabulary)[None]
    targets = tokens.flip(1)
    found = model(**source.inputs(tokens), labels=targets)
    own = summed_loss(found.logits, targets)
    same = found.loss is not None and bool((found.loss - own).abs() <= SAME * own.abs())
    return bool(runtime_of(model).fabric.from_rank_zero(same))


def _gathered(value: Any, world: int) -> list[Any]:
    found: list[Any] = [value] * world
    if dist.is_initialized() and world > 1:
        dist.all_gather_object(found, value)
    return found


def _from_rank_zero(value: Any, world: int) -> Any:
    found = [value]
    if dist.is_initialized() and world > 1:
        dist.broadcast_object_list(found)
    return found[0]
