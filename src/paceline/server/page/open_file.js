// Reports from files: read in this browser, sent nowhere.

import { ApiError } from "./api.js";
import { h } from "./dom.js";

const MAX_BYTES = 64e6;

/** A button that opens a JSON file. check(value): what is wrong with it, or null. */
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

/** A button that copies what `text()` gives. */
export function copyButton(title, text, api, className = "") {
  const button = h("button", { type: "button", class: className, text: title, onclick: async () => {
    const done = await copy(text());
    button.focus();
    button.textContent = done ? "Copied ✓" : "Select and copy it";
    api.announce(done ? "Copied" : "Select the text and copy it");
    setTimeout(() => { button.textContent = title; }, 2000);
  } });
  return button;
}

/** True: copied. Without https, browsers copy only what is selected. */
async function copy(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed here */ }
  const field = h("textarea", { class: "visually-hidden", value: text });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
