"""paceline layers"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config import EngineConfig
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.text import Tokenizer


def layers(
    model: Annotated[str, typer.Argument(help="A name from `paceline models`, a folder or a GGUF file.")],
    text: Annotated[
        Path | None, typer.Option(help="Recorded text: plain, or what `paceline trace export` wrote.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, int8.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: all cores.")] = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Find the layers that the drafter `self` can do without, and remember them."""
    config = EngineConfig(device=device, dtype=dtype, threads=threads)
    from paceline import hub
    from paceline.drafters.draft_model.calibration_text import SAMPLES
    from paceline.drafters.draft_model.chosen import find_layers
    from paceline.target.load import load_target
    from paceline.text import Tokenizer

    path = hub.resolve(model)
    tokenizer = Tokenizer.load(path)
    texts = [tokenizer.encode(sample) for sample in SAMPLES] if text is None else _recorded(text, tokenizer)
    target = load_target(path, config)
    found = find_layers(target, target.fingerprint, texts, _show)
    if as_json:
        said = {"layers": found.layers, "of": target.layers}
        print(json.dumps({**said, "agreement": found.agreement, "expected_speed": found.speed}))
        return
    print(f"layers to run      {', '.join(map(str, found.layers))} ({len(found.layers)} of {target.layers})")
    print(f"same token         {100 * found.agreement:.0f} % of the time")
    print(f"expected speed     {found.speed:.2f} times plain decoding, at best")


def _show(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{done} of {total} sets of layers tried", end=end, file=sys.stderr, flush=True)


def _recorded(path: Path, tokenizer: "Tokenizer") -> list[list[int]]:
    """A text for each request of an export; any other file is one text."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} cannot be read as text: {error}") from None
    try:
        requests = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        return [tokenizer.encode(text)]
    if not requests or not all(isinstance(request, dict) for request in requests):
        return [tokenizer.encode(text)]
    return [_tokens(request, tokenizer) for request in requests]


def _tokens(request: dict[str, Any], tokenizer: "Tokenizer") -> list[int]:
    ids = [*(request.get("prompt_ids") or ()), *(request.get("output_ids") or ())]
    if all(isinstance(token, int) and 0 <= token < tokenizer.vocab_size for token in ids) and ids:
        return ids
    return tokenizer.encode(f"{request.get('prompt') or ''}{request.get('output') or ''}")
