// Reports from files: read in this browser, sent nowhere.

import { ApiError } from "./api.js";
import { h } from "./dom.js";

const MAX_BYTES = 64e6;

/** A button that opens a JSON file. check(value): throws where it is another kind of file. */
export function fileButton(text, check, onopen, onerror) {
  const input = h("input", { type: "file", accept: "application/json,.json", hidden: true });
  input.addEventListener("change", async () => {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try { onopen(await read(file, check), file.name); } catch (error) { onerror(error); }
  });
  return h("span", { class: "open-file" }, h("button", { type: "button", text, onclick: () => input.click() }), input);
}

async function read(file, check) {
  if (file.size > MAX_BYTES) throw new ApiError(`${file.name} is too large for a report.`);
  let value;
  try { value = JSON.parse(await file.text()); } catch { throw new ApiError(`${file.name} is no JSON file.`); }
  const problem = check(value);
  if (problem) throw new ApiError(`${file.name} ${problem}`);
  return value;
}

/** Copies text; where the browser forbids that (no https), it is selected instead. True: copied. */
export async function copy(text, element) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed here */ }
  getSelection().selectAllChildren(element);
  return document.execCommand("copy");
}
