"""paceline with vLLM as the engine.

proposer                 the suffix and n-gram drafters inside vLLM, with a memory for each tenant
hidden_states_connector  vLLM's hidden states as files to train on
serve_command            the call of `vllm serve` for a route
"""
