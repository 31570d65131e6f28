"""The folder that a fine-tuning ends with: weights, configuration and tokenizer, as transformers and PEFT load them."""

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from ...config.checks import DTYPES
from ...config.job import Job
from ...init.joined import Conversions, Part
from ...storage.format import CheckpointError
from ...storage.output import SHARD_BYTES, WEIGHTS, as_json
from ..whole_weights import save_whole
from .model import LanguageModel

MODEL, ADAPTER = "model", "adapter"
GENERATION = "generation_config.json"
MARK = "zeroshard.json"
"""A file that says what a folder was made of. A folder that has it may be written again."""
_ADAPTER_NAME = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")


def folder_of(out: Path, job: Job) -> Path:
    """Return the folder of the result."""
    return out / (ADAPTER if job.language_model.lora else MODEL)


def earlier_result(folder: Path) -> list[Path]:
    """Return the weights of an earlier run in this folder.

    Raises:
        CheckpointError: the folder has weights of another program, which must not be deleted.
    """
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    found = [name for name in names if WEIGHTS.fullmatch(name)]
    if found and MARK not in names:
        raise CheckpointError(
            f"{folder} holds {found[0]!r}, which no `zeroshard finetune` wrote; choose another folder with --out, or "
            "move that away"
        )
    return [folder / name for name in found]


def save_language_model(
    out: Path, model: nn.Module, source: LanguageModel, job: Job, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write what was trained: the model, or its adapters alone. Every rank calls this."""
    folder, adapters = folder_of(out, job), bool(job.language_model.lora)
    trained: Any = model
    about = {"base": str(source.folder), "steps": job.train.steps, "files": list(job.files.files)}
    files = _adapter_files(trained, source) if adapters else _model_files(trained, source, job)
    return save_whole(
        folder,
        model,
        {MARK: as_json(about), **files},
        lambda: earlier_result(folder),
        divide=_adapter_tensor if adapters else Conversions(model).parts,
        shard_bytes=shard_bytes,
        stem="adapter_model" if adapters else "model",
    )


def _adapter_tensor(name: str, _: tuple[int, ...]) -> list[Part]:
    """Return a tensor of the adapter under the name by which PEFT loads it; nothing for all else."""
    plain, found = _ADAPTER_NAME.subn(r"\1", name)
    return [Part(plain, ())] if found else []


def _model_files(model: Any, source: LanguageModel, job: Job) -> dict[str, bytes]:
    settings = copy.deepcopy(source.settings)
    settings.architectures, settings.dtype = [type(model).__name__], DTYPES[job.precision]
    files = {"config.json": settings.to_json_string().encode(), **source.tokenizer_files}
    if (source.folder / GENERATION).is_file():  # as it is: transformers refuses to write some that it reads
        files[GENERATION] = (source.folder / GENERATION).read_bytes()
    return files


def _adapter_files(model: Any, source: LanguageModel) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        settings = copy.copy(model.peft_config["default"])
        settings.inference_mode = True
        settings.save_pretrained(folder)
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    return {**files, **source.tokenizer_files}
