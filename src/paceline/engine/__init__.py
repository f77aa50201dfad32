"""The engine: one loop of draft, verify, accept over all running sequences.

engine.py      Engine: the loop; read it first
accept.py      the acceptance rules: match, residual, block, typical
verify.py      from logits to a verdict, by the request's rule
scheduler.py   admission, priorities, chunked prefill; Scheduled: one sequence's part in a pass
drafting.py    which drafters draft for a sequence, how far, and which nodes are verified
pooling.py     embeddings: the hidden states of a text, pooled
masking.py     masks beside a pass; slow ones delay their own sequence only
control.py     Rate: one decision per pass about drafters and rows, by a price of time; Bank: bounds the loss
estimates.py   running estimates: the time of a pass; acceptance, gain and time of each drafter
saved_estimates.py  the same in a file, for the next start
engine_thread.py    EngineThread: the engine in a thread of its own, for servers and coroutines
"""
