"""Fine-tuning of a draft model: a small language model that drafts for a larger one.

pipeline        answers, training, evaluation and the model's folder
draft_dataset   the target's answers in the draft model's tokens
model           a draft model with trainable weights
lora            low-rank adapters (LoRA, arXiv 2106.09685)
finetune        settings, loss and training
card            draft_model.json
"""
