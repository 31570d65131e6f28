"""Fine-tunes a language model with LoRA and TRL's SFTTrainer, to explain the words of Python.

torchrun --nproc-per-node 2 examples/transformers/sft_zeroshard.py --model path/or/name

Without --model it trains a tiny Llama on bytes, built from its configuration, so that nothing is downloaded.
"""

import argparse
from pydoc_data.topics import topics  # the reference, as every Python brings it

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, set_seed
from trl import SFTConfig, SFTTrainer

from zeroshard.integrations.transformers import ShardedTrainerMixin


class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer): ...


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="folder or name of a pretrained model")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--sequence", type=int, default=128)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--report-every", type=int, default=10)
parser.add_argument("--out", default="sft")
args = parser.parse_args()

set_seed(0)
if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
else:
    tokenizer = ByT5Tokenizer()  # bytes: needs no files
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=args.sequence,
    )
    model = AutoModelForCausalLM.from_config(config)

data = Dataset.from_list([{"prompt": f"{word}: ", "completion": text.strip()} for word, text in topics.items()])
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))

settings = SFTConfig(
    output_dir=args.out,
    max_steps=args.steps,
    per_device_train_batch_size=args.batch,
    max_length=args.sequence,
    learning_rate=args.lr,
    logging_steps=args.report_every,
    save_steps=max(1, args.steps // 2),
    bf16=False,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = ShardedSFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer, zeroshard={"stage": 3})
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.7f}")
