"""The job of `zeroshard train`: the built-in GPT, and a corpus that every machine has.

Read `model.py` first: a plain GPT, without a word of sharding. `task.py` is the job as the loop sees it. `corpus.py`
reads text files as bytes, and `weights.py` writes and reads the trained model. `tensor_parallel.py` divides the model's
matrices among ranks, `vocabulary.py` its loss. The room knows nothing of Hugging Face, and nothing of the loop.
"""

from .model import GPT, Block

__all__ = ["GPT", "Block"]
