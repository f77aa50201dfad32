"""vLLM on a GPU, beside paceline: python -m bench.gpu_vllm [--model GGUF] [--modes plain,paceline]

vLLM's offline `LLM` in its default settings (CUDA graphs, torch.compile, asynchronous scheduling), bfloat16,
greedy. Two parts, each with one engine of its own:

sequences  random weights in a shape, prompts of 300 random tokens: milliseconds of a step by sequences
agents     SmolLM2's weights on the prompts of `python -m bench.gpu rounds`, one engine for each of --modes:
           plain, vLLM's n-gram and suffix methods, paceline's proposer. Tokens/s, and vLLM's own counters

Rows go to gpu.jsonl in the same form as those of `python -m bench.gpu`. Needs a Python with vLLM; its suffix
method needs arctic_inference.suffix_decoding (arctic-inference 0.1.1).
"""

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any, Final

for _key, _value in {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `forget` runs inside the engine
}.items():
    os.environ.setdefault(_key, _value)

from bench.gpu import SHAPES, TIED, Notes, agent_turns, transformers_model  # noqa: E402
from paceline.gate.upstream_metrics import UpstreamCounters, read_counters  # noqa: E402
from paceline.vllm.proposer import CLASS, TENANT  # noqa: E402

PLAIN: Final = "plain"
METHODS: Final[dict[str, dict[str, Any]]] = {
    PLAIN: {},
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "paceline": {"method": "custom_class", "model": CLASS},
}


def shape_folder(name: str) -> Path:
    """A folder with the configuration alone: vLLM makes the weights up."""
    shape = SHAPES[name]
    qwen = shape.architecture == "qwen2"
    config = {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": shape.architecture,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ff_width,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": name in TIED,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    folder = Path(mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_model(gguf: Path, folder: Path) -> None:
    transformers_model(gguf).save_pretrained(folder)


def model_folder(gguf: Path) -> Path:
    """SmolLM2 as Transformers writes it, with the weights of the GGUF file in bfloat16.

    A process of its own writes it: one that has used CUDA cannot fork vLLM's engine.
    """
    folder = Path(mkdtemp())
    process = get_context("spawn").Process(target=save_model, args=(gguf, folder))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{gguf} could not be written as a Transformers model")
    return folder


def engine(folder: Path, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=5120,
        max_num_seqs=32,
        kv_cache_memory_bytes=16 << 30,
        enable_prefix_caching=False,
        seed=0,
        **settings,
    )


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], tokens: int, tenant: str = ""
) -> tuple[list[list[int]], float]:
    """The answers, and the seconds from the call to the last token. tenant: of paceline's proposer."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={TENANT: tenant} if tenant else None,
    )
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def stop(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()
    time.sleep(2)


def sequences(notes: Notes, name: str, counts: Sequence[int] = (1, 8, 32), repeats: int = 3) -> None:
    """(Time of 256 tokens less time of 16) / 240, so that reading the prompts does not count."""
    llm = engine(shape_folder(name), load_format="dummy")
    rng, last = random.Random(7), SHAPES[name].vocab_size - 10
    for count in counts:
        prompts = [[rng.randrange(10, last) for _ in range(300)] for _ in range(count)]
        generate(llm, prompts, 16)
        steps = []
        for _ in range(repeats):
            short, long = (generate(llm, prompts, tokens)[1] for tokens in (16, 256))
            steps.append((long - short) / 240 * 1e3)
        notes(
            "vllm sequences",
            shape=name,
            sequences=count,
            ms=median(steps),
            all=[round(ms, 4) for ms in steps],
        )
    stop(llm)


def forget(worker: Any) -> None:
    """Empties the memory of vLLM's suffix method; runs in its worker. Tenants do that for paceline's."""
    drafter: Any = getattr(worker.model_runner, "drafter", None)
    if (cache := getattr(drafter, "suffix_cache", None)) is not None:
        drafter.suffix_cache = type(cache)(cache.max_tree_depth, cache.max_cached_requests)


def counters() -> UpstreamCounters:
    """Of the engine that runs in this process's name."""
    from prometheus_client import REGISTRY, generate_latest

    return read_counters(generate_latest(REGISTRY).decode())


def agents(notes: Notes, args: argparse.Namespace) -> None:
    """One request at a time, each round with an empty memory: a turn drafts from the turns before it alone.

    The first token's time is subtracted, as in `rounds`.
    """
    prompts = agent_turns(args.model, args.prompts)
    folder = model_folder(args.model)
    plain: list[list[int]] = []
    for mode in args.modes:
        config = METHODS[mode] and {**METHODS[mode], "num_speculative_tokens": args.length}
        llm = engine(folder, disable_log_stats=False, **({"speculative_config": config} if config else {}))
        rates: list[float] = []
        texts: list[list[int]] = []
        grown = UpstreamCounters()
        for turn in range(args.repeats + 1):
            llm.collective_rpc(forget)
            texts, seconds, grown = [], 0.0, UpstreamCounters()
            for prompt in prompts:
                first = generate(llm, [prompt], 1, f"{turn}")[1]
                before = counters()
                (text,), whole = generate(llm, [prompt], args.tokens, f"{turn}")
                grown += counters() - before
                texts.append(text)
                seconds += whole - first
            if turn:  # the first one warms up
                rates.append((args.tokens - 1) * len(prompts) / seconds)
        plain = plain or texts
        same = sum(a == b for a, b in zip(texts, plain, strict=True))
        decoding = grown.passes - len(prompts)  # the first token comes with the prompt
        notes(
            "vllm agents",
            mode=mode,
            length=args.length,
            tokens_per_s=median(rates),
            all=[round(rate, 1) for rate in rates],
            texts_equal=f"{same} of {len(texts)}",
            tokens_per_pass=grown.tokens_per_pass,
            accepted_per_pass=grown.accepted_tokens / max(1, decoding),
            accepted_per_draft=grown.accepted_per_draft,
            drafts=grown.drafts,
            draft_tokens=grown.draft_tokens,
            accepted_tokens=grown.accepted_tokens,
        )
        stop(llm)


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="SmolLM2's GGUF file, for agents")
    parser.add_argument("--shapes", type=names, default=["135m", "1.5b", "8b"])
    parser.add_argument("--modes", type=names, default=[*METHODS], help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--length", type=int, default=7, help="drafted tokens of a pass, at most")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    import vllm

    notes = Notes(args.out)
    notes("vllm", version=vllm.__version__)
    if args.model is not None:
        agents(notes, args)
    for name in args.shapes:
        sequences(notes, name)


if __name__ == "__main__":
    main()
