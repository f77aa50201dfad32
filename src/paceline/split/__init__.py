"""Split deployment: the client's device drafts, the server verifies, one WebSocket between them.

wire.py            the messages of both sides as bytes, and the fingerprint of a vocabulary
cloud.py           the server's side: a WebSocket endpoint, with the admission of the HTTP endpoints
streams.py         answers in progress, which outlive connections; tickets for browsers
edge.py            the client's side: drafts ahead, resumes after a cut
edge_page.py       the client in a browser, at /edge; its modules are in page/
npm_packages.py    wllama and onnxruntime-web, which run a model in the browser
planner.py         time per token, passes saved and bytes of each mode, and the longest round trip that pays
measured_costs.py  what the planner needs to know, measured at a server
"""
