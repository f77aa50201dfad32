"""The page at `/`: plain ES modules without a build step, and the endpoints that only they call.

assets.py    the files below, under a path with their hash; Content-Security-Policy
about.py     GET /page/about: the model, its drafters, and whether the caller is an operator
live.py      GET /page/live, /page/hour: requests in flight, the figures of /metrics, the last hour
traces.py    GET /page/runs, /page/traces: agent runs from the trace store
advice.py    GET /page/advice: the report of `paceline advise --json` that the server was given

index.html   the frame: header, navigation, one main element, the dialog for an API key
page.css     design tokens for light and dark, shared parts, and a scope for each view
theme.js     the chosen theme, before the first paint
main.js      router by hash; views/index.js lists the views, each with a tab
api.js       requests to the server: the key, one error for everything that may go wrong, server-sent events
dom.js       elements from tags, properties and text: nothing is ever parsed as HTML
format.js    numbers, times and shares as text
answer.js    an answer as it is written: tokens in the colours of their drafters
chart.js     line, scatter, bars, columns and intervals in SVG
timeline.js  agent runs on a clock: lanes, bars of turns, rounds
open_file.js reports from files, and copying text
views/       a module for each view: `mount(root, api)` fills the element and returns what ends it
"""
