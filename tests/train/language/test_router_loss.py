"""The auxiliary loss of a mixture of experts: the step's loss has it, with gradients, and an evaluation has not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import zeroshard
from tests.matrix import slow
from tests.ranks import on_ranks
from tests.train.language.chats import chats, make_model, write_lines
from zeroshard.config.finetune import FilesConfig, LanguageModelConfig
from zeroshard.config.job import FinetuneConfig, Job
from zeroshard.train.language.model import LanguageModel
from zeroshard.train.language.router_loss import router_weight
from zeroshard.train.language.task import LanguageTask
from zeroshard.train.rank import Rank

WEIGHT = 0.5
GATE = "model.layers.0.mlp.gate.weight"
SEQUENCE = 32


@pytest.mark.parametrize(("kind", "recompute"), [("mixtral", 1.0), slow("mixtral", None), slow("qwen3_moe", "auto")])
@on_ranks(2)
def test_the_auxiliary_loss_of_transformers_is_in_the_loss_and_in_the_gradients(kind: str, recompute: Any) -> None:
    import transformers

    made: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(made)
    out, rank = Path(made[0]), dist.get_rank()
    if rank == 0:
        more = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8} if kind == "qwen3_moe" else {}
        make_model(
            out / "model",
            kind=kind,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=WEIGHT,
            **more,
        )
        write_lines(out / "chats.jsonl", chats(60))
    dist.barrier()
    job = Job(
        name="job",
        model=LanguageModelConfig(huggingface=str(out / "model")),
        data=FilesConfig(files=(str(out / "chats.jsonl"),), sequence=SEQUENCE),
        train=FinetuneConfig(steps=1, tokens_per_step=6 * SEQUENCE, batch=2, device="cpu", evaluate_batches=1),
        shard={"stage": 3, "precision": "fp32", **({"activations": {"recompute": recompute}} if recompute else {})},
    )
    task = LanguageTask(job, out, Rank(rank, 2, torch.device("cpu")))
    task.start(job, None, Rank(rank, 2, torch.device("cpu")))
    model = task.build()
    model, _ = zeroshard.shard(model, task.optimizer(model), **task.shard_options())
    task.prepare(model)
    loss = torch.zeros(())
    for batch in task.micro_batches(1):
        part = task.loss(model, batch)
        part.backward()
        loss += part.detach() / 2  # the ranks' mean
    dist.all_reduce(loss)
    with zeroshard.gathered_gradients(model):
        gradient = dict(model.named_parameters())[GATE].grad.clone()
    evaluated = task.evaluate(model)

    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    batches = [
        batch
        for number in (0, 1)
        for batch in LanguageTask(job, out, Rank(number, 2, torch.device("cpu"))).micro_batches(1)
    ]
    assert [len(batch.packed.tokens) for batch in batches] == [1, 2, 1, 2]
    summed, auxiliary, learned = torch.zeros(()), torch.zeros(()), batches[0].learned
    for batch in batches:
        found = plain(input_ids=batch.packed.tokens, position_ids=batch.packed.positions, use_cache=False)
        summed = summed + cross_entropy(
            found.logits.flatten(0, 1), batch.packed.targets.flatten().long(), reduction="sum"
        )
        auxiliary = auxiliary + found.aux_loss * len(batch.packed.tokens) / 6
    expected = summed / learned + WEIGHT * auxiliary
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, dict(plain.named_parameters())[GATE].grad, rtol=1e-4, atol=1e-7)
    assert float(auxiliary) > 1
    assert evaluated is not None
    assert evaluated < float(loss) - WEIGHT / 2, "an evaluation is of tokens alone"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(out)


class Odd(nn.Module):
    """A model with an auxiliary loss whose weight nobody says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, input_ids: Any) -> Any:
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast

        return MoeCausalLMOutputWithPast(aux_loss=self.weight.sum())


@on_ranks(1)
def test_an_auxiliary_loss_without_a_weight_is_refused_by_name() -> None:
    folder = Path(tempfile.mkdtemp())
    source = LanguageModel(LanguageModelConfig(huggingface=str(make_model(folder))))
    odd = Odd()
    model, _ = zeroshard.shard(odd, torch.optim.SGD(odd.parameters()))
    with pytest.raises(
        ValueError, match=r'output_router_logits gives it an auxiliary loss.*"output_router_logits": false'
    ):
        router_weight(model, source, torch.device("cpu"))
    shutil.rmtree(folder)
