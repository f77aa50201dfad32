"""HTTP parts that the server, the gate and the split share. Nothing here knows of models or engines.

api_errors.py    ApiError, and the table from the package's errors to OpenAI's
access_log.py    one line for each request
listen.py        sockets, log lines, and a uvicorn server that drains before it stops
connections.py   HTTP connections within limits: headers, time-outs, number
browser_guard.py refuses pages of other sites, by Origin and Host
request_body.py  strict JSON within limits, checked by a pydantic model
streaming.py     server-sent events, and tasks that end when their client disconnects
request_id.py    x-request-id
conversation.py  the conversation of a request, as a hash
config_file.py   YAML and JSON files, checked as a whole and reloaded
api_keys.py      API keys and tenants
rate_limit.py    token buckets and concurrency by key
otel.py          names of attributes, and the exporter of spans
"""
