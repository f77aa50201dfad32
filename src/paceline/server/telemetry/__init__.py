"""Metrics and traces of the server.

metrics.py             counts rounds and requests
metric_definitions.py  every metric's name, labels and buckets
route_accounting.py    predicted against measured speed-up of each route
otel.py                one OpenTelemetry span for each request, exported as the environment says
"""
