// A small model in the browser, by wllama 2.3.7 (llama.cpp in WebAssembly). Greedy drafts; one sequence, rolled back to what stays.

import { download } from "./download.js";

const CONTEXT = 2048; // tokens; older ones are left out, which costs acceptance at most
const KEPT = 1024; // of them, when the context is full
const STEP = 4; // tokens in a draft message

/** The tokens by id: this version puts as many empty ones before them. */
const pieces = (listed) => (listed.slice(0, listed.length / 2).every((piece) => piece.length === 0) ? listed.slice(listed.length / 2) : listed);

export class WllamaDrafter {
  name = "model";
  step = STEP;
  #cached = []; // tokens in the KV cache
  #dropped = 0; // tokens before the context

  constructor(wllama) { this.wllama = wllama; }

  /** base: where wllama's files are. Throws if the model has another vocabulary than the target. */
  static async load({ base, url, headers = {}, vocabulary, onProgress = () => {} }) {
    const begun = performance.now();
    const { Wllama } = await import(`${base}/index.js`);
    const quiet = { debug() {}, log() {}, warn() {}, error() {} };
    const paths = { "single-thread/wllama.wasm": `${base}/single-thread/wllama.wasm`, "multi-thread/wllama.wasm": `${base}/multi-thread/wllama.wasm` };
    const wllama = new Wllama(paths, { suppressNativeLog: true, logger: quiet });
    const blob = await download(url, headers, onProgress);
    await wllama.loadModel([blob], { n_ctx: CONTEXT, n_batch: 256 });
    if (!vocabulary.agrees(pieces(await wllama.getVocab()))) {
      await wllama.exit();
      throw new Error("the model in the browser has another vocabulary than the target");
    }
    await wllama.samplingInit({ temp: 0 });
    const drafter = new WllamaDrafter(wllama);
    drafter.startMs = performance.now() - begun;
    drafter.megabytes = blob.size / 1e6;
    drafter.threads = wllama.isMultithread() ? wllama.getNumThreads() : 1;
    return drafter;
  }

  async draft(tokens, after, count) {
    const text = [...tokens, ...after];
    if (text.length - this.#dropped + count > CONTEXT) this.#dropped = text.length - KEPT;
    if (text.length < this.#dropped) this.#dropped = 0;
    const wanted = text.slice(this.#dropped);
    if (wanted.length === 0) return [];
    await this.#rollBack(wanted);
    await this.#decode(wanted.slice(this.#cached.length));
    const drafted = [];
    for (;;) {
      const { token } = await this.wllama.samplingSample();
      drafted.push(token);
      if (drafted.length === count) return drafted;
      await this.#decode([token]);
    }
  }

  /** Keeps what the cache and the text share, but for the last token of the text: its logits are needed again. */
  async #rollBack(text) {
    let common = 0;
    while (common < Math.min(this.#cached.length, text.length - 1) && this.#cached[common] === text[common]) common += 1;
    if (common === this.#cached.length) return;
    if (common === 0) await this.wllama.kvClear(); // kvRemove takes no 0
    else await this.wllama.kvRemove(common, -1);
    this.#cached = this.#cached.slice(0, common);
  }

  async #decode(tokens) {
    await this.wllama.decode(tokens, {});
    this.#cached.push(...tokens);
  }

  close() { return this.wllama.exit(); }
}
