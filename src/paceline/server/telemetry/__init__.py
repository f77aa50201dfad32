"""Metrics and traces of the server.

metrics.py             counts rounds and requests
metric_definitions.py  every metric's name, labels and buckets
otel.py                one OpenTelemetry span for each request
genai_messages.py      messages in the shape of the GenAI conventions
tracing.py             export of spans, set up from the environment
"""
