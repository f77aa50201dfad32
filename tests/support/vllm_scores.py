"""Run by a Python that has vLLM: how likely a model's folder finds the tokens of a text, printed as JSON."""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main(model: str, tokens: list[int], most: int) -> None:
    """most: how many of the likeliest tokens are told of each place."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=most, detokenize=False)
    done = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]
    places = [{token: said.logprob for token, said in place.items()} for place in done.prompt_logprobs[1:]]
    print("RESULT " + json.dumps(places))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
