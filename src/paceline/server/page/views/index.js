// The views, in the order of their tabs; the first is shown at `/`. Each is views/<name>.js with
// `export async function mount(root, api)`, which returns the function that ends it. `api` has
//   get(path), post(path, body), stream(path, body, onEvent, { signal }), poll(path, everyMs, onData, onError),
//   about (GET /page/about), rest (of the hash: #/agent/ID -> ["ID"]), params (its query),
//   announce(text) for screen readers, showError(error or null).

export const VIEWS = [
  { name: "playground", title: "Playground" },
  { name: "agent", title: "Agent runs" },
  { name: "live", title: "Live" },
  { name: "gate", title: "Gate" },
  { name: "advice", title: "Advice" },
  { name: "about", title: "About" },
];
