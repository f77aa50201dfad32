"""Draft heads: small trained networks that read the target's hidden states. Losses are in train/losses.

base              the interface, target embeddings, RMS norm, rotary positions
block             DFlash and DSpark family: a whole draft in one pass
eagle             EAGLE-3: one decoder layer, a token at a time
medusa            Medusa: independent output heads
registry          the kinds of heads by name
runner            inference with a block head: interface, and implementation in torch
calibration       Platt scaling of confidence; intervals of acceptance rates
head_checkpoint   drafter.json and drafter.safetensors
local_heads       finds drafters: local store, package, folders
versions          versions of a drafter from online training
shipped/          drafters in the package
"""
