// Chat with tools and schemas; each token in the colour of who proposed it; the same request plain, side by side.

import { Answer, firstDifference, legend } from "../answer.js";
import { ApiError, key } from "../api.js";
import { fill, h } from "../dom.js";
import { counted, number, seconds, share, times } from "../format.js";
import { copyButton } from "../open_file.js";

const ORDER = {
  type: "object", additionalProperties: false, required: ["order_id", "customer", "item", "quantity", "ship_to"],
  properties: { order_id: { type: "string" }, customer: { type: "string" }, item: { type: "string" }, quantity: { type: "integer" }, ship_to: { type: "string" } },
};
const TOOLS = [{ type: "function", function: { name: "get_weather", description: "The weather in a city.",
  parameters: { type: "object", additionalProperties: false, required: ["city", "unit"],
    properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } } } } }];
const EXAMPLES = [
  { title: "An order as JSON", text: "Order B-2047: Ada Lovelace ordered 12 brass lanterns, to be shipped to 12 St James Square, London. As JSON, please.", schema: ORDER },
  { title: "A tool call", text: "What is the weather in Oslo, in celsius?", tools: TOOLS },
  { title: "A text that repeats", text: "Count to three, ten times: one, two, three, one, two, three, one, two, three," },
];

const pretty = (value) => JSON.stringify(value, null, 2);

export function mount(root, api) {
  const { about } = api;
  const turns = []; // { message, element } of the conversation, as it is sent
  let chat = 0; // counts conversations: an answer of an earlier one is not added to this
  let running = null; // AbortController of the answer being written

  // Settings
  const field = (label, control, note) => h("div", { class: "field" }, h("label", { for: control.id, text: label }), control, note && h("p", { class: "note", text: note }));
  const area = (id, rows, placeholder, code = false) => h("textarea", { id, rows, placeholder, class: code ? "code" : "", spellcheck: code ? "false" : "true" });
  const numeric = (id, value, min, max, step) => h("input", { id, type: "number", value, min, max, step, inputmode: "decimal" });
  const models = h("select", { id: "pg-model" }, about.models.map((name) => h("option", { value: name, text: name, ...(name === about.model ? { selected: true } : {}) })));
  const system = area("pg-system", 2, "optional");
  const tools = area("pg-tools", 4, "a JSON list, as in the API", true);
  const schema = area("pg-schema", 4, "the answer has to fit it", true);
  const temperature = numeric("pg-temperature", 0, 0, 2, 0.1);
  const maxTokens = numeric("pg-max", 256, 1, about.max_model_len, 1);
  const seed = numeric("pg-seed", 7, 0, 2 ** 32 - 1, 1);
  const mustCall = h("input", { type: "checkbox", id: "pg-must-call" });
  const probabilities = h("input", { type: "checkbox", id: "pg-logprobs" });
  const ghosts = h("input", { type: "checkbox", id: "pg-ghosts", onchange: () => answers.forEach((answer) => answer.setGhosts(ghosts.checked)) });
  const place = ({ name }) => (about.default_drafters.indexOf(name) + 1) || Infinity;
  const drafters = about.drafters.toSorted((a, b) => place(a) - place(b) || 0).filter(({ name }) => !["none", "prediction", "mailbox"].includes(name)).map(({ name, about: text }) => ({
    name, box: h("input", { type: "checkbox", id: `pg-d-${name}`, ...(about.default_drafters.includes(name) ? { checked: true } : {}) }), text }));
  const answers = [];

  const check = (box, text, title) => h("label", { class: "check", for: box.id, title }, box, text);
  const settings = h("details", { class: "panel settings", open: !window.matchMedia("(max-width: 900px)").matches },
    h("summary", {}, h("h2", { text: "Request" })),
    about.models.length > 1 && field("Model", models),
    field("System prompt", system),
    field("Tools", tools),
    h("div", { class: "field" }, check(mustCall, "Require a call", "tool_choice: required")),
    field("JSON Schema of the answer", schema),
    h("div", { class: "thirds" }, field("Temperature", temperature), field("Max tokens", maxTokens), field("Seed", seed)),
    h("fieldset", {}, h("legend", { text: "Drafters" }), h("div", { class: "row" }, drafters.map(({ name, box, text }) => check(box, h("span", { class: `swatch s-${name}`, text: name }), text)))),
    check(probabilities, "Ask for the model's probabilities"),
  );

  // Conversation
  const conversation = h("div", { class: "conversation" });
  const input = h("textarea", { id: "pg-input", rows: 2, placeholder: "Write a message", "aria-label": "Message", onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); sendMessage(); }
  } });
  const send = h("button", { type: "button", class: "primary", text: "Send", onclick: () => (running ? running.abort() : sendMessage()) });
  const clear = h("button", { type: "button", class: "quiet", text: "New chat", onclick: reset });
  const composer = h("div", { class: "composer" }, input, h("div", { class: "row" }, check(ghosts, "Show rejected guesses"), h("span", { class: "grow" }), clear, send));
  root.append(
    h("h1", { class: "visually-hidden", text: "Playground" }),
    h("div", { class: "split" }, h("div", { class: "chat" }, conversation, composer), settings));
  reset();

  function reset() {
    running?.abort();
    chat += 1;
    turns.length = answers.length = 0;
    clear.disabled = true;
    fill(conversation, h("div", { class: "welcome" },
      h("h2", { text: "See who wrote each token" }),
      h("p", { text: "Drafters propose the next tokens, the model checks all of them in one pass, and the text stays the one it would have written alone. Coloured tokens were proposed; the others took a pass each." }),
      h("div", { class: "row" }, EXAMPLES.map((example) => h("button", { type: "button", text: example.title, onclick: () => {
        schema.value = example.schema ? pretty(example.schema) : "";
        tools.value = example.tools ? pretty(example.tools) : "";
        mustCall.checked = Boolean(example.tools);
        input.value = example.text;
        input.focus();
      } })))));
  }

  /** The body of a request; an error names the field that cannot be read. */
  function body() {
    const parsed = (control, name) => {
      if (!control.value.trim()) return undefined;
      try { return JSON.parse(control.value); } catch (error) { control.focus(); throw new ApiError(`${name} is not JSON: ${error.message}`); }
    };
    const shape = parsed(schema, "The JSON Schema"), offered = parsed(tools, "The list of tools");
    const chosen = drafters.filter(({ box }) => box.checked).map(({ name }) => name);
    const same = chosen.length === about.default_drafters.length && chosen.every((name) => about.default_drafters.includes(name));
    return {
      model: models.value,
      messages: [...(system.value.trim() ? [{ role: "system", content: system.value }] : []), ...turns.map(({ message }) => message)],
      temperature: Number(temperature.value), seed: Number(seed.value), max_completion_tokens: Number(maxTokens.value),
      stream: true, stream_options: { include_usage: true, include_rounds: true }, metrics: true,
      ...(offered ? { tools: offered, tool_choice: mustCall.checked && turns.at(-1).message.role === "user" ? "required" : "auto" } : {}),
      ...(shape ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: shape, strict: true } } } : {}),
      ...(probabilities.checked ? { logprobs: true } : {}),
      ...(same ? {} : { speculative_config: chosen.length ? { drafters: chosen } : { disabled: true } }),
    };
  }

  function addTurn(message, element) {
    if (!turns.length) fill(conversation);
    clear.disabled = false;
    turns.push({ message, element });
    conversation.append(element);
  }

  async function sendMessage() {
    const text = input.value.trim();
    if (!text || running) return;
    addTurn({ role: "user", content: text }, h("article", { class: "exchange user", "aria-label": "You" }, h("p", { class: "said", text })));
    input.value = "";
    const mine = chat;
    if (await answer() || mine !== chat) return;
    turns.pop()?.element.remove(); // to be sent again
    if (!turns.length) reset();
    input.value ||= text;
  }

  /** Answers the conversation; false where no token came. */
  async function answer() {
    let request;
    try { request = body(); } catch (error) { api.showError(error); return false; }
    api.showError(null);
    const turn = h("article", { class: "exchange assistant", "aria-label": "Answer" });
    conversation.append(turn);
    const written = column("With drafts", turn), mine = chat;
    toEnd();
    const message = await run(request, written);
    if (mine !== chat) return true;
    if (!message && !written.answer.tokens.length) { turn.remove(); return false; }
    turns.push({ message: message ?? { role: "assistant", content: written.answer.tokens.map(({ text }) => text).join("") }, element: turn });
    if (!message) return true;
    const compare = h("button", { type: "button", text: "Compare with plain", onclick: () => comparePlain(turn, request, written, compare) });
    const curl = copyButton("Copy as curl", () => curlOf(request), api, "quiet");
    turn.append(h("div", { class: "row after" }, legend(written.answer.tokens), h("span", { class: "grow" }), curl, compare));
    for (const call of message.tool_calls ?? []) turn.append(callCard(call, message.tool_calls));
    return true;
  }

  /** An answer with its figures: live while it is written. */
  function column(title, parent) {
    const figures = h("p", { class: "figures", text: "waiting…" });
    const shown = new Answer({ label: title, announce: api.announce, onDraw: () => { fill(figures, live(shown)); follow(); } });
    shown.setGhosts(ghosts.checked);
    answers.push(shown);
    const element = h("section", { class: "written" }, h("header", { class: "written-head" }, h("h2", { text: title }), figures), shown.element);
    parent.append(element);
    return { answer: shown, figures, element, metrics: null, finish: null };
  }

  /** Streams a request into a column; the message that it became, or null where it failed or was stopped. */
  async function run(request, into) {
    running = new AbortController();
    send.textContent = "Stop";
    const message = { role: "assistant", content: "" };
    const calls = [];
    let usage = null;
    try {
      await api.stream("/v1/chat/completions", request, (chunk) => {
        if (chunk.round) into.answer.add(chunk.round);
        if (chunk.metrics) into.metrics = chunk.metrics;
        if (chunk.usage) usage = chunk.usage;
        for (const choice of chunk.choices) {
          message.content += choice.delta.content ?? "";
          for (const part of choice.delta.tool_calls ?? []) addCall(calls, part);
          if (choice.logprobs?.content) { into.answer.finish(); into.answer.addLogprobs(choice.logprobs.content); }
          into.finish = choice.finish_reason ?? into.finish;
        }
      }, { signal: running.signal });
    } catch (error) {
      into.answer.finish();
      into.figures.append(error.name === "AbortError" ? " · stopped" : " · failed");
      api.showError(error);
      return null;
    } finally {
      running = null;
      send.textContent = "Send";
    }
    into.answer.finish();
    fill(into.figures, final(into, usage));
    if (calls.length) { message.tool_calls = calls; message.content ||= null; }
    api.announce("The answer is complete.");
    return message;
  }

  async function comparePlain(turn, request, written, button) {
    if (running) return;
    button.disabled = true;
    api.showError(null);
    const both = h("div", { class: "both" });
    written.element.before(both);
    both.append(written.element);
    const plain = column("Plain", both);
    const message = await run({ ...request, speculative_config: { disabled: true } }, plain);
    if (!message) { // failed or stopped: as it was
      both.replaceWith(written.element);
      button.disabled = false;
      return;
    }
    const at = firstDifference(written.answer.ids, plain.answer.ids);
    const ratio = plain.metrics?.mean_itl_ms / written.metrics?.mean_itl_ms;
    const passes = [written, plain].map(({ metrics }) => metrics?.passes);
    if (at >= 0) for (const one of [written, plain]) one.answer.mark(at, "differs");
    both.before(h("p", { class: "verdict", role: "status" },
      h("span", { class: `badge ${at < 0 ? "good" : "bad"}`, text: at < 0 ? "identical" : `different from token ${number(at)} on` }),
      h("strong", { text: Number.isFinite(ratio) ? `${times(ratio)} as fast per token` : "too short to compare times" }),
      h("span", { class: "note", text: `${counted(written.answer.tokens.length, "token")} in ${counted(passes[0], "pass", "passes")} instead of ${number(passes[1])}` })));
    button.remove();
  }

  /** A call with a field for its result, with which the chat goes on once all have one. */
  function callCard(call, all) {
    const result = h("textarea", { id: `call-${call.id}`, rows: 2, class: "code" });
    const card = h("section", { class: "call", "aria-label": `Call of ${call.function.name}` },
      h("p", {}, h("code", { text: call.function.name })), h("pre", { text: readable(call.function.arguments) }),
      field("Result of the tool", result),
      h("div", { class: "row end" }, h("button", { type: "button", text: "Send the result", onclick: () => {
        if (running) return;
        turns.push({ message: { role: "tool", tool_call_id: call.id, content: result.value } });
        fill(card.querySelector(".row"), h("span", { class: "note", text: "given" }));
        result.readOnly = true;
        const given = new Set(turns.map(({ message }) => message.tool_call_id));
        if (all.every(({ id }) => given.has(id))) answer();
      } })));
    return card;
  }

  /** Stays at the end of the text while the reader does. */
  function follow() {
    const page = document.documentElement;
    if (page.scrollHeight - window.innerHeight - window.scrollY < 160) toEnd();
  }

  const toEnd = () => window.scrollTo(0, document.documentElement.scrollHeight);

  return () => running?.abort();
}

const figure = (value, unit) => h("span", { class: "figure" }, h("b", { text: value }), ` ${unit}`);

function live(answer) {
  const round = answer.last;
  return [figure(round.tokens_per_pass.toFixed(2), "tokens per pass"), figure(seconds(round.token_s), "per token"), figure(number(answer.tokens.length), "tokens")];
}

/** Figures of the whole answer, as the response's `metrics` has them. */
function final({ answer, metrics, finish }, usage) {
  if (!answer.last) return "no token";
  const accepted = metrics.speculative_decoding;
  return [
    figure(answer.last.tokens_per_pass.toFixed(2), "tokens per pass"),
    metrics.passes > 1 && figure(seconds(metrics.mean_itl_ms === null ? null : metrics.mean_itl_ms / 1000), "per token"),
    figure(seconds(metrics.time_to_first_token_ms / 1000), "to the first"),
    figure(number(usage?.completion_tokens), `${usage?.completion_tokens === 1 ? "token" : "tokens"} in ${counted(metrics.passes, "pass", "passes")}`),
    accepted.num_draft_tokens > 0 && figure(share(accepted.draft_acceptance_rate), "of drafted accepted"),
    finish === "length" && figure("cut", "at max tokens"),
  ].filter(Boolean);
}

/** A command line that sends the same request; a quote in it ends the quoted part, is escaped, and begins another. */
function curlOf(request) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const authorized = key.get() ? ' -H "authorization: Bearer $PACELINE_API_KEY"' : "";
  return `curl -N ${location.origin}/v1/chat/completions -H 'content-type: application/json'${authorized} -d ${quoted(JSON.stringify(request))}`;
}

function addCall(calls, part) {
  const call = (calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
  call.function.name += part.function.name ?? "";
  call.function.arguments += part.function.arguments ?? "";
}

function readable(text) {
  try { return pretty(JSON.parse(text)); } catch { return text; }
}
