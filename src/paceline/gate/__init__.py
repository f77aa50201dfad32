"""The release gate: a candidate beside the baseline, and a verdict on evidence.

pair           the record of one request that both upstreams answered: two legs and where they differ
leg_recorder   makes a leg of the bytes that an upstream sends, as they come
gateway/       a streaming reverse proxy in front of upstreams: `paceline gate serve`
upstream       an OpenAI-compatible server, and one request to it as a leg
upstream_metrics  speculation and GPU time of a whole upstream, by its Prometheus counters
policy         margins and error rates
stats/         intervals that hold however often somebody looks
checks/        a finding for each question: latency, texts, quality, operations, cost
verdict        promote, hold or roll back, from the findings
divergence     where two answers part: a tie of two tokens, or a bug
cases          requests to replay, from recorded traces
suites         public sets with known answers, as cases
evaluators     scores of one answer: schemas, tool calls, groundedness, tests of code
judge          scores of one answer by a judge model
code_sandbox   runs a model's code in a child process with limits
replay         the offline gate: `paceline gate run`
report         a verdict as JSON and as one HTML file
store          pairs, feedback, rollouts and their audit, in the trace store's database
promotion      stages of a rollout, driven by the verdict
"""
