"""Hugging Face models as `finetune` trains them: weights in shards, adapters, packed documents, and refusals."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import zeroshard
from tests.matrix import slow
from tests.ranks import on_ranks
from tests.train.language.chats import VOCABULARY, make_model
from zeroshard.config.finetune import FilesConfig, LanguageModelConfig
from zeroshard.config.job import FinetuneConfig, Job
from zeroshard.runtime import runtime_of
from zeroshard.storage.format import CheckpointError
from zeroshard.train.language.model import LanguageModel
from zeroshard.train.language.packing import IGNORED, Excerpt, Sequences
from zeroshard.train.language.task import computes_loss, keeps_apart
from zeroshard.train.language.weights import earlier_result, folder_of, save_language_model

CPU = torch.device("cpu")


def source(folder: Path, **options: Any) -> LanguageModel:
    return LanguageModel(LanguageModelConfig(huggingface=str(folder), **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"))


@on_ranks(2)
def test_weights_go_into_shards_and_adapters_keep_the_values_that_they_have(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    whole = source(folder).build(0).requires_grad_(False)
    assert all(parameter.is_meta for parameter in whole.parameters())
    model, _ = zeroshard.shard(whole, stage=3, precision="fp32", weights=folder)
    found = zeroshard.full_state_dict(model)
    assert all(torch.equal(found[name], saved[name]) for name in saved)

    adapted = source(folder, lora=4).build(dist.get_rank())  # other values on the second rank
    adapters = {name: value.clone() for name, value in adapted.named_parameters() if value.requires_grad}
    assert all(".lora_" in name and not value.is_meta for name, value in adapters.items())
    assert len(adapters) == 2 * 2 * 7, "two matrices beside seven layers in each of two blocks, none beside the head"
    optimizer = torch.optim.AdamW([value for value in adapted.parameters() if value.requires_grad])
    model, _ = zeroshard.shard(adapted, optimizer, stage=3, precision="fp32", weights=folder)
    found = zeroshard.full_state_dict(model)
    for name, value in found.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if name not in adapters:
            assert torch.equal(value, saved[plain]), name
        elif dist.get_rank() == 0:
            assert torch.equal(value, adapters[name].detach()), name
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, {name: found[name] for name in adapters})
    assert all(torch.equal(everybody[0][name], everybody[1][name]) for name in adapters), "rank 0's count"


def loaded(model: LanguageModel) -> Any:
    whole = model.build(0).requires_grad_(False)
    return zeroshard.shard(whole, precision="fp32", weights=model.folder)[0].eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_document_has_the_logits_that_it_has_alone(attention: str, folder: Path) -> None:
    llama = source(folder, attention=attention)
    model = loaded(llama)
    assert keeps_apart(model, llama, CPU, batch=2)
    assert computes_loss(model, llama, CPU)
    lengths = [5, 9, 4, 3]
    tokens = torch.randint(VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    documents = [Excerpt(sum(lengths[:number]), size) for number, size in enumerate(lengths)]
    data = Sequences.pack(tokens, torch.zeros_like(tokens), documents, 24, seed=0)
    batch = data.take([0, 0])
    with torch.no_grad():
        packed = model(**llama.inputs(batch.tokens, batch.positions)).logits
        place = 0
        for start, size in data.packs[0]:
            alone = model(input_ids=tokens[None, start : start + size].long()).logits[0]
            torch.testing.assert_close(packed[1, place : place + size], alone, atol=1e-6, rtol=1e-5)
            place += size
    assert place == 21, "all documents are in one sequence"
    assert (batch.targets[0, place:] == IGNORED).all()


@pytest.mark.parametrize("kind", ["gpt2", slow("qwen2"), slow("gemma")])
def test_other_architectures_keep_packed_documents_apart(kind: str, tmp_path: Path) -> None:
    other = source(make_model(tmp_path, kind=kind))
    assert keeps_apart(loaded(other), other, CPU, batch=2)


def test_a_model_whose_states_run_on_from_document_to_document_is_found_out(tmp_path: Path) -> None:
    mamba = source(make_model(tmp_path, kind="mamba", state_size=4, expand=2))
    assert not keeps_apart(loaded(mamba), mamba, CPU, batch=2)


def alone_in_a_batch_of_one(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Looks for documents only in a batch of one sequence, as flash attention in transformers."""
    seen = torch.ones(1, 1, query.shape[2], query.shape[2], dtype=torch.bool).tril()
    if len(query) == 1:
        document = (position_ids == 0).cumsum(1)
        seen = seen & (document[:, None, :, None] == document[:, None, None])
    key, value = (tensor.repeat_interleave(module.num_key_value_groups, 1) for tensor in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, seen).transpose(1, 2), None


def test_attention_that_keeps_documents_apart_only_in_a_batch_of_one_is_found_out(folder: Path) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("alone", alone_in_a_batch_of_one)
    AttentionMaskInterface.register("alone", lambda *_, **__: None)
    llama = source(folder, attention="alone")
    model = loaded(llama)
    assert [keeps_apart(model, llama, CPU, batch) for batch in (1, 2, 3)] == [True, False, False]


def test_flash_attention_is_given_all_sequences_as_one_row(folder: Path) -> None:
    tokens, positions = torch.arange(12).view(3, 4), torch.arange(4).expand(3, 4)
    given = source(folder, attention="flash_attention_2").inputs(tokens, positions)
    assert given["input_ids"].tolist() == [list(range(12))]
    assert given["position_ids"].tolist() == [[0, 1, 2, 3] * 3]


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_models_folder_is_never_run_and_nobody_is_asked(
    file: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = shutil.copytree(folder, tmp_path / "foreign")
    settings = json.loads((foreign / file).read_text())
    changes = (
        {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Foreign"}}
        if file == "config.json"
        else {"tokenizer_class": "Foreign", "auto_map": {"AutoTokenizer": ["foreign.Foreign", None]}}
    )
    (foreign / file).write_text(json.dumps({**settings, **changes}))
    (foreign / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="it needs Python code from its folder, which is never run"):
        source(foreign).check()
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.mark.parametrize(("lora", "is_tied"), [(0, False), (4, False), (0, True), slow(4, True)])
@on_ranks(2)
def test_the_folder_that_is_written_has_the_logits_of_the_sharded_model(
    lora: int, is_tied: bool, folder: Path, tied: Path
) -> None:
    folder = tied if is_tied else folder
    llama = source(folder, lora=lora)
    job = Job(name="job", model=llama.config, data=FilesConfig(), train=FinetuneConfig(), shard={"precision": "fp32"})
    whole = llama.build(0)
    optimizer = torch.optim.AdamW([value for value in whole.parameters() if value.requires_grad], lr=0.1)
    model, optimizer = zeroshard.shard(whole, optimizer, stage=3, precision="fp32", weights=folder)
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
    out: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(out)
    runtime = runtime_of(model)
    runtime.fabric.take_volume()
    save_language_model(Path(out[0]), model, llama, job, shard_bytes=40_000)
    moved = sum(traffic.elements for traffic in runtime.fabric.take_volume().shards.values())
    trained = sum(flat.layout.numel for flat in runtime.flats if flat.trainable)
    assert moved == trained, "a frozen base is not gathered"
    save_language_model(Path(out[0]), model, llama, job, shard_bytes=40_000)  # an earlier result is replaced
    written = folder_of(Path(out[0]), job)
    if lora:
        import peft

        loaded: Any = peft.AutoPeftModelForCausalLM.from_pretrained(written)
        assert not list(written.glob("model*"))
    else:
        import transformers

        loaded = transformers.AutoModelForCausalLM.from_pretrained(written)
        assert loaded.config.tie_word_embeddings is is_tied
        assert len(list(written.glob("model-*.safetensors"))) > 1
        assert loaded.config.use_cache, "it generates as the model did that it was made of"
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(input_ids=tokens).logits, logits, atol=1e-6, rtol=1e-5)
    dist.barrier()
    if dist.get_rank() == 0:
        (written / "zeroshard.json").unlink()
        with pytest.raises(CheckpointError, match="which no `zeroshard finetune` wrote"):
            earlier_result(written)
        shutil.rmtree(out[0])


@on_ranks(2)
def test_the_folder_of_a_mixture_of_experts_has_the_tensors_of_the_folder_that_was_trained() -> None:
    made: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(made)
    folder, out = Path(made[0], "mixtral"), Path(made[0], "out")
    if dist.get_rank() == 0:
        make_model(folder, kind="mixtral", num_local_experts=3)
    dist.barrier()
    mixtral = source(folder)
    job = Job(name="job", model=mixtral.config, data=FilesConfig(), train=FinetuneConfig(), shard={"precision": "fp32"})
    whole = mixtral.build(0)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    model, optimizer = zeroshard.shard(whole, optimizer, stage=3, precision="fp32", weights=folder)
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
    save_language_model(out, model, mixtral, job)
    before, after = (load_file(file / "model.safetensors") for file in (folder, folder_of(out, job)))
    assert after.keys() == before.keys()
    assert sum(".block_sparse_moe.experts." in name for name in after) == 2 * 3 * 3
    assert all(after[name].shape == before[name].shape and not after[name].equal(before[name]) for name in after)
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder_of(out, job))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(input_ids=tokens).logits, logits, atol=1e-6, rtol=1e-5)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(made[0])


def test_a_model_that_computes_another_loss_is_found_out(folder: Path) -> None:
    llama = source(folder)
    model = loaded(llama)
    del model._loss_function
    assert not computes_loss(model, llama, CPU)


def test_a_folder_that_cannot_be_trained_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    def broken(name: str, **changes: Any) -> LanguageModel:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **changes}))
        return source(copy)

    no_tokenizer = broken("tokenizer")
    for file in no_tokenizer.folder.glob("tokenizer*"):
        file.unlink()
    no_weights = broken("weights")
    (no_weights.folder / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    for model, expected in (
        (no_tokenizer, "it has no tokenizer that can be read"),
        (no_weights, r"has neither model\.safetensors nor model\.safetensors\.index\.json"),
        (broken("bert", model_type="bert", architectures=["BertForMaskedLM"]), "'BertForMaskedLM' is no causal"),
        (broken("t5", model_type="t5", architectures=["T5ForConditionalGeneration"]), "is no causal language model"),
        (broken("quantised", quantization_config={"quant_method": "fp8"}), "its weights are quantised"),
        (broken("unknown", model_type="nothing"), r"config\.json cannot be read"),
        (source(tmp_path / "empty"), r"the folder has no config\.json"),
        (source(tmp_path / "none"), "no such folder"),
        (source(Path("somebody/model")), r"the Hugging Face hub did not give it.*hf download somebody/model"),
    ):
        with pytest.raises(ValueError, match=expected):
            model.check()
    with pytest.raises(ValueError, match=r"data\.sequence: 129 is more than the 128 positions"):
        source(folder).sequence(129)
    assert source(folder).sequence(0) == 128
