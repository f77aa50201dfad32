"""python -m bench serve, soak, gateway: a running server, measured over HTTP.

command         python -m bench serve
servers         paceline's and llama.cpp's servers as processes
http_client     a streaming client that takes times
cut_prompts     prompts of an exact length
concurrency     many agents at once
next_turn       time to first token of turn n+1
overhead        the server against the bare engine
tables          the tables of both commands
soak            python -m bench soak
soak_requests   its good, bad and broken requests
soak_load       its clients
hostile_soak    python -m bench soak --hostile
hostile         its attacks: a function for each
victims         its ordinary clients, with gaps, /health and memory
gateway         python -m bench gateway: streams through the gate and directly
pairs           requests that both soaks send with drafts and without, and the comparison of answers
pair_drafters   the lists of drafters of these pairs, and a server that has them all
clock_jumps     paceline's command line under a wall clock that jumps
"""
