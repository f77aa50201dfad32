"""The gateway: a streaming reverse proxy in front of OpenAI-compatible servers.

launch            settings, uvicorn; `paceline gate serve`
app               paths, admission, health, models, metrics
config            gate.yaml: upstreams and routes, reloaded on change
request_context   one request: body, route, conversation, attempts, end
proxy             choice of upstreams, retries, streaming event by event
upstream_client   requests to upstreams, pooled
metrics_poller    metrics of upstreams that are compared
mirror            second legs: who is sampled, how they are sent, pairs
store_writer      writes to the store from a thread of its own
circuit_breaker   the breaker of an upstream, the retry budget of a route
metrics           Prometheus
page              experiments, reports and pairs for the page's gate view
spans             OpenTelemetry
"""
