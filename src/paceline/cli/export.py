"""paceline export: a model in a form that other runtimes load."""

from pathlib import Path
from typing import Annotated

import typer

from paceline import hub
from paceline.cli import completion
from paceline.cli.options import MODEL_HELP


def export(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=completion.models)],
    out: Annotated[Path, typer.Argument(help="A new folder; with --onnx a new file.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="An ONNX file with the KV cache as inputs and outputs.")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; with --onnx float32, float16 or gguf.")
    ] = "float32",
    context: Annotated[
        int, typer.Option(min=0, help="With --onnx: most positions; 0: those of the model.")
    ] = 0,
) -> None:
    """Write a GGUF file as a Hugging Face folder, or a model as an ONNX file."""
    path = hub.resolve(model)
    if onnx:
        from paceline.convert.onnx_decoder import export_onnx

        export_onnx(path, out, dtype=dtype, context=context)  # type: ignore[arg-type]  # checked there
    else:
        from paceline.convert import export_model

        export_model(path, out, dtype=dtype)  # type: ignore[arg-type]  # checked there
    size = sum(file.stat().st_size for file in (out.rglob("*") if out.is_dir() else [out]))
    print(f"{model} is at {out}, {size / 1e6:,.0f} MB")
