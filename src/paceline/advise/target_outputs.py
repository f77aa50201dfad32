"""Outputs of the target to replay: those it wrote in the traces, or its answers to recorded requests.

Text of another model says little about how well this one's can be drafted, so such requests are answered
again. Speculation changes no token, so the answers are written with drafts. The turn before a request is read
first, if it was not answered: a conversation finds its beginning in the prefix cache.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, cat

from paceline.advise.pass_times import TimedPass
from paceline.advise.replay import Decoding, RecordedOutput
from paceline.advise.traffic import TokenizedRequest, TracedRequest
from paceline.config import SamplingParams, SpecConfig
from paceline.constraints import OutputSpec
from paceline.engine.engine import Engine
from paceline.errors import PacelineError, PromptTooLong
from paceline.target.cost import PassCost
from paceline.types import Feed, Round, Seq

if TYPE_CHECKING:
    from paceline.llm import LLM

PLAIN_TOKENS: Final = 9  # of an answer that is begun again without drafts
CHUNK: Final = 256  # tokens of a pass that reads hidden states
SAMPLING: Final = frozenset(f.name for f in fields(SamplingParams)) - {"logprobs", "choice", "stop"}

Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """One output of the target, ready to be replayed."""

    tokenized: TokenizedRequest
    recorded: RecordedOutput
    prefill_ms: float | None  # until the first token, with what the prefix cache held
    rounds: tuple[Round, ...] = ()  # of an answer that was written now, the first with its first token
    decode_ms: float = 0.0  # of all rounds but the first
    plain: tuple[TimedPass, ...] = ()  # of its beginning, written again right after it without drafts

    @property
    def conversation(self) -> str:
        return self.tokenized.request.conversation


@dataclass(frozen=True, slots=True)
class OutputLimits:
    max_tokens: int = 256  # of an answer that is written now, where the request sets no lower limit
    max_prompt: int = 8192  # tokens; longer requests are left out
    seconds: float = 600.0  # for all answers together


def target_outputs(
    llm: "LLM",
    requests: Sequence[TracedRequest],
    limits: OutputLimits,
    progress: Progress = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
    before: Mapping[str, TracedRequest] | None = None,
) -> tuple[list[TargetOutput], dict[str, int]]:
    """The outputs, in the order of the requests, and how many have none, by reason.

    before: the turn before a request, by the request's id.
    """
    made: list[TargetOutput] = []
    left_out: dict[str, int] = {}
    deadline = clock() + limits.seconds
    for number, request in enumerate(requests):
        progress("answers", number, len(requests))
        if clock() > deadline:
            left_out["no time was left"] = len(requests) - number
            break
        try:
            earlier = (before or {}).get(request.id)
            answered = number and earlier is requests[number - 1]
            made.append(_output(llm, request, limits, None if answered else earlier))
        except (PacelineError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = str(error).splitlines()[0][:100] or type(error).__name__
            left_out[reason] = left_out.get(reason, 0) + 1
    progress("answers", len(requests), len(requests))
    return made, left_out


def _output(
    llm: "LLM", request: TracedRequest, limits: OutputLimits, before: TracedRequest | None
) -> TargetOutput:
    longest = min(limits.max_prompt, llm.target.max_context - 1)
    too_long = PacelineError(f"prompts of more than {longest:,} tokens")
    try:
        seq = prepared(llm, request, limits)
    except PromptTooLong:  # tells each one's length: they count together
        raise too_long from None
    if seq.prompt_len > longest:
        raise too_long
    if _is_own(llm, request):
        recorded = RecordedOutput(seq, request.output_ids)
        prefill_ms = None if request.prefill_s is None else 1000 * request.prefill_s
        return TargetOutput(_tokenized(llm, request, recorded), recorded, prefill_ms)
    if before is not None:
        read_prompt(llm.engine, prepared(llm, before, limits))
    return _answered(llm, request, seq)


def read_prompt(engine: Engine, seq: Seq) -> None:
    """Leaves its prompt in the prefix cache, as an answer would."""
    engine.submit(replace(seq, prefill=True, cursor=None))
    while engine.busy:
        for r in engine.step():
            if r.error is not None:
                raise r.error


def _is_own(llm: "LLM", request: TracedRequest) -> bool:
    """True if this model wrote the recorded output."""
    own = request.model == llm.name
    return own and bool(request.output_ids) and max(request.output_ids) < llm.target.vocab_size


def prepared(llm: "LLM", request: TracedRequest, limits: OutputLimits) -> Seq:
    """The request as a sequence, constraint and seed included."""
    body = request.body
    own = _is_own(llm, request)
    sampling: dict[str, Any] = {
        name: value for name, value in body.items() if name in SAMPLING and value is not None
    }
    allowed = body.get("max_completion_tokens") or body.get("max_tokens") or limits.max_tokens
    most = max(int(allowed), len(request.output_ids)) if own else min(int(allowed), limits.max_tokens)
    params = SamplingParams(**{**sampling, "max_tokens": most, "min_tokens": 0})
    output = OutputSpec(
        tuple(body.get("tools") or ()),
        body.get("tool_choice") or "auto",
        bool(body.get("parallel_tool_calls", True)),
        body.get("response_format"),
    )
    messages, text = body.get("messages"), str(body.get("prompt") or "")
    prompt: Any = request.prompt_ids if own and request.prompt_ids else messages or text
    seeded = params if params.seed is not None else replace(params, seed=_seed(request.id))
    seq = llm.prepare(prompt, seeded, output, tenant=request.tenant or request.route).seq
    seq.anonymous = request.anonymous
    return seq


def _seed(name: str) -> int:
    """The same request gets the same answer every time."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:4])


def _tokenized(llm: "LLM", request: TracedRequest, recorded: RecordedOutput) -> TokenizedRequest:
    prompt = tuple(recorded.seq.tokens[: recorded.seq.prompt_len])
    return TokenizedRequest(request, prompt, recorded.output, llm.tokenizer.decode(recorded.output))


def _answered(llm: "LLM", request: TracedRequest, seq: Seq) -> TargetOutput:
    before = _copy(seq)
    started = time.perf_counter()
    rounds, ended = _rounds(llm, seq)
    recorded = RecordedOutput(before, tuple(seq.output), cached=seq.cached)
    tokenized = _tokenized(llm, request, recorded)
    prefill_ms, decode_ms = 1000 * (ended[0] - started), 1000 * (ended[-1] - ended[0])
    written = TargetOutput(tokenized, recorded, prefill_ms, tuple(rounds), decode_ms)
    return replace(written, plain=tuple(_plain_passes(llm, written)))


def _plain_passes(llm: "LLM", one: TargetOutput) -> list[TimedPass]:
    """The beginning of an answer again, without drafts."""
    seq = _copy(one.recorded.seq)
    params = replace(seq.params, max_tokens=min(PLAIN_TOKENS, seq.params.max_tokens), min_tokens=0)
    again = replace(seq, id=f"{seq.id} plain", params=params, spec=SpecConfig((), max_draft=0))
    rounds, _ = _rounds(llm, again)
    return [TimedPass(r.rows, r.start, r.target_us / 1000) for r in rounds[1:]]


def _rounds(llm: "LLM", seq: Seq) -> tuple[list[Round], list[float]]:
    """Those of an answer, the first with its first token, and when each ended."""
    llm.engine.submit(seq)
    rounds, ended = list[Round](), list[float]()
    while not rounds or rounds[-1].finish is None:
        for r in llm.engine.step():
            if r.error is not None:
                raise r.error
            if r.tokens or r.finish:
                rounds.append(r)
                ended.append(time.perf_counter())
    return rounds, ended


def _copy(seq: Seq) -> Seq:
    """As it is before its first pass."""
    return replace(
        seq,
        tokens=list(seq.tokens),
        cursor=None if seq.cursor is None else seq.cursor.clone(),
        stopped_by=None,
    )


def host_ms(outputs: Sequence[TargetOutput]) -> float:
    """Of a round, outside of the target: median of the answers that were written now; 0: there are none."""
    rests = []
    for one in outputs:
        if decoding := one.rounds[1:]:
            inside = sum(r.target_us for r in decoding) / 1000
            rests.append(max(0.0, one.decode_ms - inside) / len(decoding))
    return median(rests) if rests else 0.0


def host_factor(outputs: Sequence[TargetOutput], replayed: Sequence[Decoding]) -> float:
    """What drafting took while answers were written now, over what it takes in their replay; 1 or more.

    Medians of the answers, of the time per round: while an answer is written, a thread may wait for a core.
    """
    written = [fmean(r.draft_us for r in one.rounds[1:]) / 1000 for one in outputs if one.rounds[1:]]
    again = median([one.draft_ms / one.passes for one in replayed if one.passes] or [0.0])
    return max(1.0, median(written) / again) if written and again else 1.0


def prompt_row_ms(outputs: Sequence[TargetOutput], cost: PassCost) -> float:
    """That a row of a prompt adds to a pass, while answers were written now; 0: none were."""
    read = [one for one in outputs if one.rounds and one.prefill_ms is not None]
    rows = sum(one.recorded.seq.prompt_len - one.recorded.cached for one in read)
    ms = sum(max(0.0, (one.prefill_ms or 0.0) - cost(1, 0)) for one in read)
    return ms / rows if rows else 0.0


def prefill_ms(outputs: Sequence[TargetOutput]) -> float:
    """Mean; 0 where nothing was measured."""
    known = [one.prefill_ms for one in outputs if one.prefill_ms is not None]
    return fmean(known) if known else 0.0


def reading_times(outputs: Sequence[TargetOutput]) -> list[float]:
    """Milliseconds until each one's first token; the mean where it was not measured."""
    mean = prefill_ms(outputs)
    return [mean if one.prefill_ms is None else one.prefill_ms for one in outputs]


def with_hidden(llm: "LLM", one: TargetOutput, taps: Sequence[int]) -> TargetOutput:
    """The same with the target's hidden states at these layers: one reading of the whole text."""
    seq, output = one.recorded.seq, one.recorded.output
    tokens = [*seq.tokens[: seq.prompt_len], *output]
    read = Seq("\0advise", tokens, len(tokens), tenant="\0advise")
    target, parts = llm.target, list[Mapping[int, Tensor]]()
    target.open(read)
    try:
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            hidden = target.forward([Feed(read.id, chunk, scored=False)], taps).hidden
            parts.append({tap: hidden[tap].clone() for tap in taps})
            target.keep(read.id, start + len(chunk))
    finally:
        target.close(read.id)
        target.forget(read.tenant)
    states = {tap: cat([part[tap] for part in parts]) for tap in taps}
    return replace(one, recorded=replace(one.recorded, hidden=states))
