"""The ready-made job behind `zeroshard train`: a GPT, a corpus every machine has, and an ordinary training loop."""
