"""The job of `zeroshard finetune`: a causal language model of Hugging Face, trained on the user's documents.

Read `task.py` first: it is the job as the loop sees it. Data goes through four files: `documents.py` reads files,
`encoding.py` makes tokens of them and marks what is learned, `packing.py` fills sequences, and `dataset.py` joins
these and stores the result. `model.py` checks a folder and builds its model on the meta device, `token_loss.py` is the
loss, `forecast.py` asks the plan what to run, `weights.py` writes the result, and `views.py` shows it.

Only functions of `model.py` import transformers and peft, so importing the room is quick and needs neither. The room
knows nothing of the built-in GPT, and nothing of the loop.
"""
