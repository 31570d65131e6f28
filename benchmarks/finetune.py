"""Fine-tunes a Llama of any shape with random weights: whether it fits, how fast it is, how near the plan.

    PYTHONPATH=. python benchmarks/finetune.py /tmp/llama-8b -- --steps 6 --tokens-per-step 65536
    PYTHONPATH=. python benchmarks/finetune.py /tmp/llama-8b -- --steps 6 --tokens-per-step 65536 --lora 16

The first run writes the model (16 GB for the default, the shape of Llama 3 8B), later runs use it. What follows "--"
goes to `zeroshard finetune`. On a CPU, before the "--":
    --layers 2 --hidden 64 --heads 4 --key-value-heads 2 --vocabulary 512 --sequence 64
"""

import argparse
import json
import math
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from zeroshard.storage.output import Output, Shards, WholeTensor

FILES = 200
DRAWN = (1 << 24) + 43
"""Random numbers that the weights repeat: drawing 8 billion takes a minute. Odd, so that no two rows are equal."""


def main() -> None:
    """Make model and data, if they are not there, and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the model, the data and the run")
    for name, usual in (("layers", 32), ("hidden", 4096), ("heads", 32), ("key-value-heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--sequence", type=int, default=2048)
    mine, _, rest = "\0".join(sys.argv[1:]).partition("\0--\0")
    given = parser.parse_args(mine.split("\0"))
    model, data = given.folder / "model", given.folder / "data.jsonl"
    if not (model / "config.json").exists():
        write_model(model, given)
        write_data(data)
    out = given.folder / f"run-{len(list(given.folder.glob('run-*')))}"
    command = [sys.executable, "-m", "zeroshard", "finetune", str(model), str(data), "--out", str(out)]
    command += [
        "--sequence",
        str(given.sequence),
        "--lr",
        "1e-5",
        "--set",
        "train.sample=8",
        *filter(None, rest.split("\0")),
    ]
    print(" ".join(command), flush=True)
    sys.exit(subprocess.run(command, check=False).returncode)


def write_model(folder: Path, given: argparse.Namespace) -> None:
    """Write configuration, tokenizer, and random weights tensor by tensor."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = transformers.LlamaConfig(
        hidden_size=given.hidden,
        intermediate_size=given.hidden * 7 // 2,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.key_value_heads,
        vocab_size=given.vocabulary,
        max_position_embeddings=max(8192, given.sequence),
        eos_token_id=0,
        architectures=["LlamaForCausalLM"],
    )
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    bytewise.add_special_tokens(["<|end|>"])
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|end|>").save_pretrained(folder)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    drawn = torch.empty(DRAWN, dtype=torch.bfloat16).normal_(std=1 / math.sqrt(given.hidden))
    with Output(folder) as output:
        shards = Shards(output, [WholeTensor(name, tuple(p.shape), torch.bfloat16) for name, p in whole.items()])
        for name, shape in ((name, p.shape) for name, p in whole.items()):
            size = math.prod(shape)
            values = drawn.repeat(-(-size // DRAWN))[:size] if len(shape) > 1 else torch.ones(size, dtype=drawn.dtype)
            shards.write(name, values.view(shape))
        shards.finish()
    config.save_pretrained(folder)


def write_data(file: Path) -> None:
    """Write source files of Python's standard library, a document each."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    file.write_text("".join(json.dumps({"text": source.read_text(errors="replace")}) + "\n" for source in sources))


if __name__ == "__main__":
    main()
