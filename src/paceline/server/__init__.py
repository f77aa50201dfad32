"""An OpenAI-compatible server. Read openai/chat.py first: a request from its body to its last event.

launch.py        settings to a running server
app.py           paths, middleware, lifespan
openai/          one file for each endpoint: the owner of a request
page/            the page at `/`: modules for the browser, and the endpoints that only they call
admission.py     API key, route, limits, priority, deadline: a RequestContext
routes.py        the routes file
warm_prompts.py  prompts that are read into the cache before anybody sends them
preload.py       what was used last is made ready again at the start: pages and grammars
recent_outputs.py  the tools and response formats used last, in a file
model_pool.py    the models: loaded on demand, unloaded when another one needs the room
models_file.py   the file of `--models`
async_engine.py  AsyncEngine: requests on the engine's thread, as deltas
estimates_saver.py  the controller's estimates outlive the server
access_log.py    the figures of a request in its line
request_log.py   the end of a request: metrics, span, trace, training sample
heap.py          freed memory back to the system, after large requests
tool_prediction/ tool calls predicted from a tenant's earlier ones
telemetry/       Prometheus metrics and OpenTelemetry spans
online/          online training of drafters
"""
