"""Metrics and traces of the server.

metrics.py             counts rounds and requests
metric_definitions.py  every metric's name, labels and buckets
otel.py                one OpenTelemetry span for each request, exported as the environment says
"""
