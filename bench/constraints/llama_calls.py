"""llama.cpp's server on the turns of a file of answers. Runs in the environment of its wheel:

.peers/xllamacpp/bin/python -m bench.constraints.llama_calls MODEL.gguf ANSWERS.jsonl OUT.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

CONTEXT: Final = 8192
MAX_TOKENS: Final = 110


def serve(model: str) -> Any:
    import xllamacpp as x  # type: ignore[import-not-found]

    p = x.CommonParams()
    p.model.path, p.use_jinja = model, True
    p.n_ctx, p.n_parallel, p.cache_ram_mib, p.port = CONTEXT, 1, 0, 0
    p.no_extra_bufts = True
    return x.Server(p)


def main(model: str, answers: str, out: str) -> None:
    server = serve(model)
    with Path(out).open("w") as file:
        for line in Path(answers).read_text().splitlines():
            turn = json.loads(line)
            request = {
                "messages": turn["messages"],
                "tools": turn["tools"],
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
            }
            reply = server.handle_chat_completions(request)
            file.write(json.dumps({"id": turn["id"], "answer": reply}) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
