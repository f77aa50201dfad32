"""The release gate: a candidate beside the baseline, and a verdict on evidence.

pair           the record of one request that both upstreams answered: two legs and where they differ
leg_recorder   makes a leg of the bytes that an upstream sends, as they come
upstream       an OpenAI-compatible server, and one request to it as a leg
spec_counters  speculation of a whole upstream, by its Prometheus counters
"""
