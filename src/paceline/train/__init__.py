"""Training of drafters on the target's own answers to recorded traffic.

config          settings common to all trainings
recipe          settings of head training; a network and its loss for each kind of head
trainer         the training loop, with checkpoints that resume
head_pipeline   answers, training, evaluation and publishing of a draft head
publish         writes a drafter's folder, measures it as stored, calibrates its confidence
evaluate        acceptance on held-out text, through the code that serves
optim           AdamW and Muon
train_decoder   a batched decoder of the target in plain torch
vllm_decoder    the same with the hidden states of a vLLM server

data/           from recorded conversations to the target's answers and batches
losses/         one loss for each family of heads
draft_model/    fine-tuning of whole draft models, with LoRA or all weights
online/         the trainer process of a server
"""
