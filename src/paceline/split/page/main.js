// The page: form, figures, and the answer with its provisional end. Text of models is always textContent.

import { key, problem } from "./api.js";
import { fill, h, perFrame, tile } from "./dom.js";
import { number } from "./format.js";
import { NgramDrafter } from "./ngram.js";
import { OnnxDrafter } from "./onnx_drafter.js";
import { Session } from "./session.js";
import { Vocabulary } from "./vocabulary.js";
import { WllamaDrafter } from "./wllama_drafter.js";

const $ = (id) => document.getElementById(id);
const PATIENCE_MS = 65_535; // for a draft: as long as the server allows; it is told at once where none will come

let vocabulary = null, fingerprint = null, about = null, session = null, best = null; // best: model drafter here

const headers = () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {});

async function request(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(), cache: "no-cache" });
  if (response.ok) return response;
  if (response.status === 401) $("key-field").hidden = false;
  throw await problem(response);
}

async function prepare() {
  about ??= await (await request("/edge/about")).json();
  if (vocabulary === null) {
    const loaded = new Vocabulary(await (await request("/v1/split/vocabulary")).arrayBuffer());
    fingerprint = await loaded.fingerprint();
    vocabulary = loaded;
  }
}

const ticket = async () => (key.get() ? (await (await request("/v1/split/tickets", { method: "POST" })).json()).ticket : "");
const connect = () => new WebSocket(`${location.origin.replace(/^http/, "ws")}/v1/split`);

const models = new Map(); // loaded, by the drafter's name

async function chosenDrafter() {
  const name = $("drafter").value === "model" ? best : $("drafter").value;
  if (name === "none" || fingerprint === null) return null;
  if (name === "ngram") return new NgramDrafter();
  if (!models.has(name)) models.set(name, await loadModel(name));
  return models.get(name);
}

async function loadModel(name) {
  const onProgress = ({ size, total }) => note(`Loading the model: ${(size / 1e6).toFixed(0)} of ${(total / 1e6).toFixed(0)} MB`);
  const { base, model } = about[name === "wllama" ? "wllama" : "onnxruntime"];
  const given = { base, url: model, headers: headers(), vocabulary, backend: name, onProgress };
  const loaded = await (name === "wllama" ? WllamaDrafter.load(given) : OnnxDrafter.load(given));
  const where = name === "webgpu" ? "on the GPU" : `${loaded.threads} thread${loaded.threads === 1 ? "" : "s"}`;
  note(`The model is here: ${loaded.megabytes.toFixed(0)} MB, ready in ${(loaded.startMs / 1000).toFixed(1)} s, ${where}.`);
  return loaded;
}

const note = (text) => { $("drafter-note").textContent = text; };

function showError(text) {
  $("error").hidden = !text;
  $("error").textContent = text ?? "";
}

async function run(event) {
  event.preventDefault();
  session?.close();
  showError(null);
  clearAnswer();
  if ($("key").value) key.set($("key").value);
  busy(true);
  try {
    await prepare();
    const drafter = await chosenDrafter();
    session = new Session({ connect, ticket, fingerprint, drafter, onChange: draw });
    session.start(body(), { mode: $("mode").value, waitMs: $("mode").value === "patient" ? PATIENCE_MS : 0 });
  } catch (error) {
    showError(error.message);
    busy(false);
  }
}

const body = () => ({
  messages: [{ role: "user", content: $("prompt").value }],
  max_tokens: Number($("max-tokens").value),
  temperature: Number($("temperature").value),
  seed: Number($("seed").value),
  ...($("only-edge").checked ? { speculative_config: { drafters: ["mailbox"] } } : {}),
});

function busy(runs) {
  $("run").disabled = runs;
  $("stop").disabled = !runs;
}

// The answer: committed tokens are appended once, provisional ones drawn anew.
let shown = 0, decoder = new TextDecoder();

function clearAnswer() {
  shown = 0;
  decoder = new TextDecoder();
  fill($("committed"));
  $("provisional").textContent = "";
}

function appendCommitted() {
  const committed = $("committed");
  for (; shown < session.tokens.length; shown += 1) {
    const text = vocabulary.text([session.tokens[shown]], decoder);
    if (!text) continue;
    const kind = session.drafted[shown] ? "drafted" : "own";
    if (committed.lastChild?.className === kind) committed.lastChild.append(text);
    else committed.append(h("span", { class: kind, text }));
  }
  if (session.status === "done" && session.characters !== null) cut(committed, session.characters);
}

/** Removes what follows a stop string. characters: code points that stay. */
function cut(element, characters) {
  const all = [...element.textContent];
  let extra = all.slice(characters).join("").length;
  while (extra > 0) {
    const last = element.lastChild, text = last.textContent;
    if (text.length <= extra) { last.remove(); extra -= text.length; }
    else { last.textContent = text.slice(0, text.length - extra); extra = 0; }
  }
}

/** The text of provisional tokens; a character that begins in committed ones is theirs as a whole. */
function provisionalText() {
  const recent = session.tokens.slice(-8);
  const before = vocabulary.text(recent), all = vocabulary.text([...recent, ...session.ahead]);
  return all.slice(before.length);
}

function drawFigures() {
  const { passes, accepted, drafts, bytesUp, bytesDown, reconnects, draftMs } = session.figures, count = session.tokens.length;
  fill($("figures"),
    tile("Tokens", number(count), `${accepted} drafted here`),
    tile("Passes of the target", number(passes), count && passes ? `${(count / passes).toFixed(2)} tokens each` : ""),
    tile("Round trip", session.rttMs === null ? "–" : `${number(session.rttMs, 1)} ms`, reconnects ? `${reconnects} reconnection${reconnects === 1 ? "" : "s"}` : ""),
    tile("A drafted token", draftMs === null ? "–" : `${number(draftMs, 1)} ms`, `${drafts} drafted`),
    tile("Bytes per token", count ? `${number(bytesUp / count)} ↑ ${number(bytesDown / count)} ↓` : "–"));
}

const STATES = { idle: "idle", connecting: "connecting", answering: "connected", offline: "connection lost, resuming", done: "done", failed: "failed" };

const draw = perFrame(() => {
  appendCommitted();
  $("provisional").textContent = provisionalText();
  drawFigures();
  $("connection").textContent = STATES[session.status];
  $("connection").dataset.state = session.status;
  Object.assign($("answer").dataset, { status: session.status, tokens: session.tokens.length, passes: session.figures.passes, accepted: session.figures.accepted });
  if (session.model) { $("model").textContent = session.model; $("model").hidden = false; }
  showError(session.error);
  if (session.status === "done" || session.status === "failed") {
    busy(false);
    $("status").textContent = session.status === "done" ? "The answer is complete." : "The answer failed.";
  }
});

/** What this browser and this server can do; n-grams always. */
async function offer() {
  const adapter = about.onnxruntime ? await navigator.gpu?.requestAdapter().catch(() => null) : null;
  const can = { wllama: about.wllama, webgpu: about.onnxruntime && adapter, wasm: about.onnxruntime };
  // A GPU before WebAssembly, unless it is emulated; wllama before ONNX, which starts and drafts far slower there.
  const emulated = adapter?.info?.isFallbackAdapter ?? adapter?.isFallbackAdapter ?? false;
  best = [...(emulated ? [] : ["webgpu"]), "wllama", "wasm", "webgpu"].find((name) => can[name]) ?? null;
  can.model = best;
  for (const [name, possible] of Object.entries(can)) $("drafter").querySelector(`[value="${name}"]`).disabled = !possible;
  if (fingerprint === null) note("This browser computes no SHA-256 outside of https and localhost: the answer comes without drafts.");
  else if (about.reason) note(about.reason);
  else if (!crossOriginIsolated) note("A model runs in one thread: this page is not cross-origin isolated.");
  document.body.dataset.ready = "true";
}

$("form").addEventListener("submit", run);
$("stop").addEventListener("click", () => session?.cancel());
window.addEventListener("online", () => session?.online());
prepare().then(offer).catch((error) => showError(error.message));
