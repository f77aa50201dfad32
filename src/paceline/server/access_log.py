"""The figures of a request in the access log: tokens, passes and times. No prompt, answer or key."""

from collections.abc import Iterator

from paceline.server.admission import RequestContext
from paceline.server.request_log import finish_of


def figures(context: RequestContext) -> Iterator[str]:
    """The sums over all outputs; each prompt counts once. Times are seconds from the arrival."""
    outputs = context.outputs
    prompts = [output.seq for output in outputs if output.seq.params.choice == 0]
    stats = [output.stats() for output in outputs]
    yield f"model={context.model.name}"
    yield f"route={context.route.name}"
    yield f"prompt={sum(seq.prompt_len for seq in prompts)}"
    yield f"cached={sum(seq.cached for seq in prompts)}"
    if disk := sum(seq.cached_on_disk for seq in prompts):
        yield f"disk={disk}"
    yield f"output={sum(s.output_tokens for s in stats)}"
    yield f"passes={sum(s.passes for s in stats)}"
    if stats:
        yield f"queue={min(s.queue_s for s in stats):.3f}"
        firsts = [s.first_token_s for s in stats if s.first_token_s is not None]
        yield f"first={min(firsts):.3f}" if firsts else "first=-"
        yield f"finish={','.join(sorted({finish_of(output) for output in outputs}))}"
    if context.refusal is not None:
        yield f"refused={context.refusal}"
    if context.error is not None:
        yield f"error={context.error}"
