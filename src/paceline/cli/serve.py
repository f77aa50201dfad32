"""paceline serve"""

from typing import Annotated

import typer

from paceline.config import EngineConfig, LearnConfig


def serve(
    model: Annotated[str, typer.Argument(help="A name from `paceline models`, a folder or a GGUF file.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model for the drafter `model`.")] = None,
    trained: Annotated[
        list[str] | None, typer.Option(help="A trained drafter's name or folder; give several.")
    ] = None,
    drafters: Annotated[str, typer.Option(help="Asked in this order; auto: the usual ones.")] = "auto",
    keys: Annotated[str | None, typer.Option(help="Only holders of these keys may ask.")] = None,
    routes: Annotated[str | None, typer.Option(help="A file that says which requests speculate how.")] = None,
    store: Annotated[str | None, typer.Option(help="Where traces go: a file, a URL, or none.")] = None,
    trace_text: Annotated[bool, typer.Option(help="Keep prompts and answers in the traces too.")] = False,
    learn: Annotated[
        bool | None,
        typer.Option(
            "--learn/--no-learn",
            help="Train the drafters given with --trained on what is served, while idle; "
            "--no-learn: drafters do not even remember finished requests.",
        ),
    ] = None,
    cors: Annotated[list[str] | None, typer.Option(help="An origin that may ask from a browser.")] = None,
    max_batch: Annotated[int, typer.Option(help="Most requests in one pass.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Most requests that wait; more get a 429.")] = 256,
    drain: Annotated[float, typer.Option(help="Seconds for running requests to end on SIGTERM.")] = 30.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, int8.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: all cores.")] = 0,
    cache_mb: Annotated[int, typer.Option(help="Memory for the KV cache.")] = 1024,
) -> None:
    """Serve a model to any OpenAI client."""
    engine = EngineConfig(
        device=device,
        dtype=dtype,
        threads=threads,
        cache_mb=cache_mb,
        max_batch=max_batch,
        max_waiting=max_waiting,
    )
    from paceline.server.launch import ServerSettings, run

    run(
        ServerSettings(
            model=model,
            host=host,
            port=port,
            draft_model=draft_model,
            trained=tuple(trained) if trained else None,
            drafters=None if drafters == "auto" else tuple(d.strip() for d in drafters.split(",")),
            engine=engine,
            keys=keys,
            routes=routes,
            store=store,
            trace_text=trace_text,
            learn=learn is not False,
            refresh=LearnConfig() if learn else None,
            cors=tuple(cors or ()),
            drain_s=drain,
        )
    )
