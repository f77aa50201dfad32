"""Run by a Python that has the speculators library: reads an exported folder, says what it found as JSON."""

import json
import sys


def main(folder: str) -> None:
    from safetensors import safe_open
    from speculators import SpeculatorModelConfig
    from speculators.model import SpeculatorModel

    config = SpeculatorModelConfig.from_pretrained(folder)
    net = SpeculatorModel.registered_model_class_from_config(config)(config=config)
    wanted = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        given = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    missing = [n for n in wanted if wanted[n] != given.get(n) and not n.startswith(("verifier_", "embed_"))]
    print(
        "RESULT "
        + json.dumps(
            {
                "type": config.speculators_model_type,
                "verifier": config.speculators_config.verifier.name_or_path,
                "tokens": config.speculators_config.proposal_methods[0].speculative_tokens,
                "missing": missing,
                "unexpected": sorted(set(given) - set(wanted)),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
