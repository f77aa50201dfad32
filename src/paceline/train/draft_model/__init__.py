"""Fine-tuning of a draft model: a small language model that drafts for a larger one.

pipeline        answers, in the draft model's tokens; training, evaluation and the model's folder
model           a draft model with trainable weights: all, or low-rank adapters (LoRA, arXiv 2106.09685)
finetune        settings, loss and training
card            draft_model.json
"""
