"""HTTP parts that the server, the gate and the split share. Nothing here knows of models or engines.

api_errors.py   ApiError, and the table from the package's errors to OpenAI's
validation.py   pydantic's errors as messages with a path and the nearest known name
json_body.py    strict JSON bodies within limits
streaming.py     server-sent events, and tasks that end when their client disconnects
request_id.py   x-request-id
config_file.py  YAML and JSON files, checked as a whole and reloaded
api_keys.py     API keys and tenants
rate_limit.py   token buckets and concurrency by key
"""
