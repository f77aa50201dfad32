// A small model in the browser, by onnxruntime-web: on the GPU where the browser has WebGPU, else in WebAssembly. Greedy drafts.
//
// The file is that of `paceline export --onnx`: keys and values go in and come out, and a smaller past_length rolls back.

import { download } from "./download.js";

const CONTEXT = 512; // tokens; older ones are left out, which costs acceptance at most
const KEPT = 256; // of them, when the context is full
const STEP = 4; // tokens in a draft message
const MAX_THREADS = 4;
const MAX_LAYERS = 128;
const WARM_TOKENS = 64;

export class OnnxDrafter {
  name = "model";
  step = STEP;
  #cached = []; // tokens in the cache
  #cache; // tensors by the names of inputs
  #dropped = 0; // tokens before the context

  constructor(ort, model, backend) {
    Object.assign(this, { ort, model, backend });
    const named = (prefix) => model.inputMetadata.filter(({ name }) => name.startsWith(prefix));
    this.inputs = named("past_key_values.").map(({ name }) => name);
    const [, kvHeads, , headDim] = named("past_key_values.")[0].shape;
    const nothing = () => new ort.Tensor("float32", new Float32Array(0), [1, kvHeads, 0, headDim]);
    this.#cache = Object.fromEntries(this.inputs.map((name) => [name, nothing()]));
  }

  /** base: where onnxruntime-web's files are. backend: webgpu, or wasm. */
  static async load({ base, url, headers = {}, backend, onProgress = () => {} }) {
    const begun = performance.now();
    const ort = await import(`${base}/ort.webgpu.min.mjs`);
    ort.env.wasm.wasmPaths = `${location.origin}${base}/`;
    ort.env.wasm.numThreads = crossOriginIsolated ? Math.min(MAX_THREADS, navigator.hardwareConcurrency ?? 1) : 1;
    ort.env.logLevel = "error";
    const bytes = new Uint8Array(await (await download(url, headers, onProgress)).arrayBuffer());
    const options = { executionProviders: [backend], logSeverityLevel: 3 };
    if (backend === "webgpu") options.preferredOutputLocation = onGpu; // keys and values, which no script reads
    const drafter = new OnnxDrafter(ort, await ort.InferenceSession.create(bytes, options), backend);
    await drafter.draft(Array.from({ length: WARM_TOKENS }, (_, i) => i + 1), [], 3); // a GPU compiles programs at their first use
    drafter.startMs = performance.now() - begun;
    drafter.megabytes = bytes.length / 1e6;
    drafter.threads = ort.env.wasm.numThreads;
    return drafter;
  }

  async draft(tokens, after, count) {
    const text = [...tokens, ...after];
    if (text.length < this.#dropped) this.#dropped = 0;
    if (text.length - this.#dropped + count > CONTEXT) this.#dropped = text.length - KEPT;
    const wanted = text.slice(this.#dropped);
    if (wanted.length === 0) return [];
    let common = 0; // the last token of the text is computed again: what follows it is not kept
    while (common < Math.min(this.#cached.length, wanted.length - 1) && this.#cached[common] === wanted[common]) common += 1;
    this.#cached.length = common;
    const drafted = [];
    for (let next = wanted.slice(common); ; next = [drafted.at(-1)]) {
      drafted.push(await this.#forward(next));
      if (drafted.length === count) return drafted;
    }
  }

  async #forward(tokens) {
    const { Tensor } = this.ort, number = (value) => new Tensor("int64", BigInt64Array.of(BigInt(value)), [1]);
    const ids = new Tensor("int64", BigInt64Array.from(tokens, BigInt), [1, tokens.length]);
    const given = { input_ids: ids, num_logits: number(1), past_length: number(this.#cached.length), ...this.#cache };
    const outputs = await this.model.run(given, ["token", ...this.inputs.map(present)]);
    for (const name of this.inputs) {
      this.#cache[name].dispose();
      this.#cache[name] = outputs[present(name)];
    }
    this.#cached.push(...tokens);
    return Number(outputs.token.data[0]);
  }

  close() { return this.model.release(); }
}

const present = (name) => name.replace("past_key_values", "present");
const onGpu = Object.fromEntries(Array.from({ length: MAX_LAYERS }, (_, i) => [`present.${i}.key`, `present.${i}.value`]).flat().map((name) => [name, "gpu-buffer"]));
