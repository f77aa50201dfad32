"""The command line, a file for each group of commands.

main       the entry point; doctor
options    option groups that commands share
models     pull, models (also ls and list), rm; what pulls a missing model
show       show
config     paceline.toml; config show
completion names that a shell completes
generate   generate, chat
render     coloured tokens, summaries, pictures, progress bars
serve      serve
edge       edge: drafts here, verified by a server
gate       gate serve
gate_run   gate run
gate_status gate status, gate set, gate rollback, gate export
check      routes check, schema check
cache      cache ls, cache clear, cache warm
keys       keys new, keys ls, keys rm
trace      trace ls, trace show, trace export
drafters   drafters, drafters rollback, drafters export, drafters import, layers
train      train
export     export
split      split plan, split pull
vllm       vllm command
estimate   estimate
advise     advise
doctor     facts about this machine
"""

from paceline.cli.main import main

__all__ = ["main"]
