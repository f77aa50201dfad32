"""python -m bench runs, agents: whole agent runs over HTTP, turn by turn, against llama.cpp's server.

command          python -m bench runs
conversations    recorded conversations, and the requests that their turns make
replay           one conversation sent to one server: first tokens, times, cached tokens, text
arms             paceline's and llama.cpp's servers: how each starts, is asked, and keeps its cache on disk
rounds           rounds within a time budget: each server in turn, in another order every round
rows             rows, ratios and tables
effects          python -m bench agents: what each habit of a fast agent is worth
restarts         python -m bench restarts: the first token of a prompt that an earlier process has read
tool_waits       python -m bench prefetch-served: runs with slow tools, with prefetching or not
recorded_answers the server of tool_waits, whose answers are those of a recording

History. A turn's request has the recorded messages before it, and the model's own answer is timed and
dropped: so all servers read the same prompts, however their answers differ by rounding. An agent sends back
the model's own answer instead, whose tokens are in the cache already: with recorded history every server
reads some tens of tokens more in each turn. `--history own` sends back the answers that this very server
gave. Then the prompts of two servers differ as soon as one answer does, and tool results no longer fit the
calls: it shows the reuse of own turns, and is no fair race.
"""
