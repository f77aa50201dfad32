"""python -m bench.peers.dense MODEL.gguf: a model's weights in float32, as a folder of safetensors.

For the peers that read no GGUF file on a CPU, or take minutes to. Runs in an environment with transformers.
"""

import sys
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent.parent.parent / ".peers" / "models"


def folder_of(model: Path) -> Path:
    """Where the folder is, or is to be."""
    return FOLDER / model.stem


def write(model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    )
    loaded.hf_quantizer = None  # the weights are no longer quantised, and would be refused as such
    del loaded.config.quantization_config
    loaded.save_pretrained(folder_of(model))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
