"""OpenAI's API: one file for each endpoint, each read top to bottom.

chat.py                /v1/chat/completions: parse, admit, prepare, run, stream, account
completions.py         /v1/completions
responses.py           /v1/responses
prefill.py             /v1/prefill: prompts into the cache, and nothing generated
embeddings.py          /v1/embeddings: hidden states pooled to vectors
models.py              /v1/models, /tokenize, /detokenize
serving.py             the parts that endpoints share
rounds.py              the chunks of `stream_options.include_rounds`
protocol.py            request bodies; responses_protocol.py: those of /v1/responses
params.py              from a request body to GenerateParams
responses_events.py    output items of /v1/responses and their events
openapi.py             the OpenAPI document
"""
