"""Run by a Python that has vLLM: answers prompts with a drafter or without, and prints what came as JSON.

vLLM's own speculator for DSpark runs on GPUs alone. `AnchoredBlocks` drives vLLM's own DSpark model, loaded
by vLLM's own loader, on the CPU: as that speculator does, on top of vLLM's CPU code for DFlash. Of that code
one step is replaced: its CPU kernel weighs the context's keys of every layer as those of the first.
"""

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main(
    model: str, drafter: str, method: str, guesses: int, prompts: list[list[int]], max_tokens: int
) -> None:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model  # type: ignore[import-not-found]
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker import gpu_model_runner

    class AnchoredBlocks(DFlashProposer):  # type: ignore[misc]
        def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> Any:
            """The anchor and one slot fewer, and a guess from every one of them."""
            self.num_speculative_tokens -= 1
            try:
                count, _, metadata = super().set_inputs_first_pass(*args, **kwargs)
            finally:
                self.num_speculative_tokens += 1
            return count, torch.arange(count), metadata

        def _greedy_sample(self, hidden: torch.Tensor) -> torch.Tensor:
            size = self.num_speculative_tokens
            base = self.model.compute_draft_logits(hidden).view(-1, size, self.model.config.draft_vocab_size)
            previous, said = self.input_ids[: len(base) * size : size].clone(), []
            for slot in range(size):
                bias = self.model.markov_bias(self.model.markov_embed(previous))
                previous = self.model.map_draft_to_target((base[:, slot] + bias).argmax(-1))
                said.append(previous)
            return torch.stack(said, 1).flatten()

    def by_its_own_weights(self: Any, keys: torch.Tensor) -> torch.Tensor:
        """keys: [layers, places, heads, size]."""
        norms = [layer.self_attn.k_norm for layer in self.layers]
        return torch.stack([norm(rows.contiguous()) for norm, rows in zip(norms, keys, strict=True)])

    if method == "dspark":
        made = EngineArgs.create_speculative_config

        def as_dflash(self: Any, *args: Any, **kwargs: Any) -> Any:
            config = made(self, *args, **kwargs)
            assert config.method == "dspark"
            assert config.draft_model_config.architectures == ["Qwen3DSparkModel"]
            config.method = "dflash"
            return config

        EngineArgs.create_speculative_config = as_dflash
        gpu_model_runner.DFlashProposer = AnchoredBlocks
        DFlashQwen3Model._normalize_context_k = by_its_own_weights
    drafts: list[list[list[int]]] = []  # of each prompt, in the order they were made
    propose = SpecDecodeBaseProposer.propose

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        said = propose(self, *args, **kwargs)
        drafts[-1] += said.tolist()
        return said

    SpecDecodeBaseProposer.propose = noted
    spec = {"model": drafter, "method": method, "num_speculative_tokens": guesses} if drafter else None
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=spec,
        disable_log_stats=False,
    )
    params, tokens = SamplingParams(temperature=0, max_tokens=max_tokens), []
    for ids in prompts:
        drafts.append([])
        done = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        tokens.append(list(done[0].outputs[0].token_ids))
    kept = [m.values for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos"]
    found = {"tokens": tokens, "drafts": drafts, "kept": kept[0] if kept else []}
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
