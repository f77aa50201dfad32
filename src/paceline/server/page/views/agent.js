// Agent runs: #/agent lists them, #/agent/ID is one run on its clock, #/agent/ID/OTHER two runs on one clock.

import { add, fill, h, panel, scroller, tile } from "../dom.js";
import { clock, counted, number, seconds, share, times } from "../format.js";
import { lanes, PAUSES, PHASES, rounds, turnBar } from "../timeline.js";

const MAX_TEXT = 20000; // characters of a message that are shown

export async function mount(root, api) {
  const [first, second] = api.rest;
  const ended = [];
  if (!first) await list(root, api);
  else if (second) compare(root, await api.get(`/page/runs/${encodeURIComponent(first)}/${encodeURIComponent(second)}`), ended);
  else one(root, api, await api.get(`/page/runs/${encodeURIComponent(first)}`), ended);
  return () => ended.forEach((part) => part.destroy());
}

const link = (id) => `#/agent/${encodeURIComponent(id)}`;
const drafters = (run) => (run.plain ? "plain" : run.drafters.join(", "));
/** { right: 2, wrong: 1 } → "2 right, 1 wrong" */
const foreseen = (outcomes) => Object.entries(outcomes).filter(([, count]) => count).map(([outcome, count]) => `${number(count)} ${outcome}`).join(", ") || "none";

const drafterBadges = (run) => (run.plain
  ? h("span", { class: "swatch s-target", text: "plain" })
  : h("span", { class: "row tight" }, run.drafters.map((name) => h("span", { class: `swatch s-${name}`, text: name }))));

/** All runs of the store, newest first. */
async function list(root, api) {
  const body = h("div");
  const show = async () => {
    const { runs, requests, stored } = await api.get("/page/runs");
    api.announce(`${runs.length} runs`);
    fill(body, runs.length ? runTable(runs) : h("p", { class: "empty", text: stored
      ? "No requests yet. Each conversation that the server answers appears here."
      : "This server keeps no traces: it was started with --store none." }));
    note.textContent = runs.length ? `of the latest ${number(requests)} requests` : "";
  };
  const note = h("span", { class: "note" });
  root.append(
    h("h1", { text: "Agent runs" }),
    panel("Stored runs", body, { actions: [note, h("button", { type: "button", class: "quiet", text: "Refresh", onclick: () => show().catch(api.showError) })] }),
  );
  await show();
}

function runTable(runs) {
  const twins = new Map();
  for (const run of runs) if (run.conversation) twins.set(run.conversation, [...(twins.get(run.conversation) ?? []), run]);
  const other = (run) => twins.get(run.conversation)?.find((one) => one.plain !== run.plain);
  return scroller("Stored runs", h("table", { class: "runs" },
    h("thead", {}, h("tr", {}, ["started", "route", "drafters"].map((text) => h("th", { text })),
      ["turns", "time", "tokens", "per pass", "accepted", "prompt reused"].map((text) => h("th", { class: "n", text })), h("th", { text: "compare" }))),
    h("tbody", {}, runs.map((run) => h("tr", {},
      h("td", {}, h("a", { href: link(run.id), text: clock(run.created) }), labels(run.metadata)),
      h("td", { text: run.route || "–" }),
      h("td", {}, drafterBadges(run)),
      h("td", { class: "n", text: number(run.turns) }),
      h("td", { class: "n", text: seconds(run.seconds) }),
      h("td", { class: "n", text: number(run.output_tokens) }),
      h("td", { class: "n", text: number(run.tokens_per_pass, 2) }),
      h("td", { class: "n", text: share(run.acceptance) }),
      h("td", { class: "n", text: share(run.reused) }),
      h("td", {}, other(run) && h("a", { href: pairLink(run, other(run)), text: run.plain ? "with drafters" : "with plain" })))))));
}

const labels = (metadata) => Object.entries(metadata).slice(0, 3).map(([name, value]) => h("div", { class: "note", text: `${name}: ${value}` }));
/** The plain run is the baseline. */
const pairLink = (a, b) => { const [base, cand] = a.plain || !b.plain ? [a, b] : [b, a]; return `${link(base.id)}/${encodeURIComponent(cand.id)}`; };

const legend = (marks) => h("ul", { class: "legend", "aria-label": "Colours" },
  [...PHASES, ...PAUSES].map(({ title, color, thin }) => h("li", {}, h("span", { class: thin ? "key pause" : "key", vars: { "--c": `var(${color})` } }), h("span", { text: title }))),
  marks && h("li", {}, h("span", { class: "key diamond" }), h("span", { text: "calls foreseen before they were written" })));

/** One run. */
function one(root, api, { run, others }, ended) {
  const { summary, phases } = run;
  const rows = h("div", { class: "turns", role: "list", "aria-label": "Turns" });
  const picture = h("div");
  add(root,
    h("p", { class: "crumbs" }, h("a", { href: "#/agent", text: "Agent runs" }), ` / ${clock(summary.created)}`),
    h("h1", {}, `${counted(summary.turns, "turn")} in ${seconds(summary.seconds)} `, drafterBadges(summary)),
    h("dl", { class: "tiles" },
      tile("Answers", seconds(summary.answer_s), `reading ${seconds(phases.prefill)}, passes ${seconds(phases.verify)}, drafting ${seconds(phases.draft)}`),
      tile("Between turns", seconds(run.tools_s + run.client_s), `tools ${seconds(run.tools_s)}, client ${seconds(run.client_s)}`),
      tile("Tokens per pass", number(summary.tokens_per_pass, 2), `${number(summary.output_tokens)} tokens, ${number(summary.passes)} passes`),
      tile("Accepted", share(summary.acceptance), `${number(summary.accepted)} of ${number(summary.drafted)} drafted tokens`),
      tile("Prompt reused", share(summary.reused), run.saved_s === null ? `${number(summary.cached_tokens)} tokens were not read again` : `saved at least ${seconds(run.saved_s)}`),
      Object.keys(summary.predicted_calls).length > 0 && tile("Calls foreseen", number(summary.predicted_calls.right ?? 0), foreseen(summary.predicted_calls))),
    panel("On the clock", h("div", {}, picture, legend(Object.keys(summary.predicted_calls).length > 0)),
      { note: "drafting and passes: whole ones, which other requests may share" }),
    others.length > 0 && panel("Other runs of this conversation", h("ul", { class: "links" }, others.map((other) => h("li", {},
      h("a", { href: pairLink(summary, other), text: `Compare with ${other.plain ? "the plain run" : drafters(other)}` }),
      ` of ${clock(other.created)}: ${counted(other.turns, "turn")}, ${seconds(other.answer_s)} of answers`)))),
    panel("Turns", rows, { note: "bars begin at the arrival of each turn" }),
  );
  const max = Math.max(...run.turns.map((turn) => turn.seconds));
  run.turns.forEach((turn, i) => rows.append(turnRow(api, turn, i, max, ended)));
  ended.push(lanes(picture, { lanes: [{ name: "", run, onturn: (i) => { const row = rows.children[i].querySelector("button"); row.focus(); row.scrollIntoView({ block: "center" }); } }],
    end: summary.seconds, label: `${summary.turns} turns in ${seconds(summary.seconds)}: ${seconds(summary.answer_s)} of answers, ${seconds(run.tools_s)} of tools` }));
}

const turnFigures = (turn) => [
  ["tokens", number(turn.output_tokens)],
  ["per pass", number(turn.tokens_per_pass, 2)],
  ["accepted", share(turn.acceptance)],
  [`of ${number(turn.prompt_tokens)} reused`, number(turn.cached_tokens)],
];

function turnRow(api, turn, i, max, ended) {
  const detail = h("div", { class: "turn-detail", id: `turn-${i}`, hidden: true });
  let shown = null;
  const toggle = async () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", `${open}`);
    detail.hidden = !open;
    if (!open || shown) return;
    fill(detail, h("p", { class: "note", text: "Loading…" }));
    try { shown = await turnDetail(detail, await api.get(`/page/traces/${encodeURIComponent(turn.id)}`), turn); ended.push(shown); }
    catch (error) { fill(detail, h("p", { class: "bad", text: error.message })); }
  };
  const outcome = Object.keys(turn.predicted_calls).length ? `foreseen: ${foreseen(turn.predicted_calls)}` : "";
  const button = h("button", { type: "button", class: "turn-head", "aria-expanded": "false", "aria-controls": `turn-${i}`, onclick: toggle },
    h("span", { class: "turn-number", text: `${i + 1}` }),
    h("span", { class: "turn-time", text: seconds(turn.seconds) }),
    h("span", { class: "turn-track" }, turnBar(turn, max)),
    h("span", { class: "turn-figures" }, turnFigures(turn).map(([name, value]) => h("span", {}, h("b", { text: value }), ` ${name}`))),
    h("span", { class: "turn-end" }, h("span", { class: turn.error ? "bad" : "", text: turn.error ?? turn.finish ?? "–" }), outcome && h("span", { class: "turn-foreseen", text: outcome })));
  return h("div", { class: "turn", role: "listitem" }, button, detail);
}

async function turnDetail(root, trace, turn) {
  const picture = h("div");
  const texts = trace.messages || trace.output !== null;
  fill(root,
    picture,
    h("p", { class: "note", text: `${counted(trace.rounds.length, "round")}, as high as the tokens they brought. Rounds are recorded with their length: gaps between them are spread evenly. ${
      turn.saved_s ? `Prefix reuse saved at least ${seconds(turn.saved_s)} of reading.` : ""}` }),
    texts ? conversation(trace) : h("p", { class: "note", text: "Texts are not recorded: --trace-text, or trace_text of a route, switches them on." }),
    h("p", { class: "note mono", text: trace.id }));
  return rounds(picture, { trace, label: `${trace.rounds.length} rounds in ${seconds(trace.seconds)}` });
}

/** The last messages of the prompt, and the answer: text, whatever it contains. */
function conversation(trace) {
  const messages = (trace.messages ?? (trace.prompt === null ? [] : [{ role: "prompt", content: trace.prompt }])).map((message) => [message.role, contentOf(message)]);
  const earlier = messages.slice(0, -2), last = messages.slice(-2);
  return h("div", { class: "messages" },
    earlier.length > 0 && h("details", {}, h("summary", { text: counted(earlier.length, "earlier message") }), earlier.map(message)),
    last.map(message),
    trace.output !== null && message(["answer", trace.output]));
}

const message = ([role, text]) => h("div", { class: "message" }, h("h3", { text: role }),
  h("pre", { text: text.length > MAX_TEXT ? `${text.slice(0, MAX_TEXT)}… (${number(text.length - MAX_TEXT)} more characters)` : text || "–" }));

function contentOf({ content, tool_calls: calls }) {
  const text = typeof content === "string" ? content : Array.isArray(content) ? content.map((part) => part?.text ?? `[${part?.type}]`).join("") : "";
  return [text, ...(calls ?? []).map((call) => `${call?.function?.name}(${call?.function?.arguments})`)].filter(Boolean).join("\n");
}

/** Two runs on one clock. */
function compare(root, { baseline, candidate, comparison }, ended) {
  const names = [baseline, candidate].map(({ summary }) => drafters(summary));
  const [a, b] = names[0] === names[1] ? names.map((name, i) => `${name}, ${clock([baseline, candidate][i].summary.created)}`) : names;
  const { same, differing, unknown, speedup } = comparison;
  const verdict = differing ? ["bad", `Texts differ in ${differing} of ${same + differing} turns`]
    : same ? ["good", `Identical text in ${same === 1 ? "the one turn" : `all ${same} turns`}`] : ["", "Texts are not recorded"];
  const picture = h("div");
  const end = Math.max(baseline.summary.seconds, candidate.summary.seconds);
  const max = Math.max(...[...baseline.turns, ...candidate.turns].map((turn) => turn.seconds));
  add(root,
    h("p", { class: "crumbs" }, h("a", { href: "#/agent", text: "Agent runs" }), " / ",
      h("a", { href: link(baseline.summary.id), text: a }), " against ", h("a", { href: link(candidate.summary.id), text: b })),
    h("h1", { text: "The same conversation, twice" }),
    h("div", { class: `banner ${verdict[0]}` }, h("p", { class: "banner-title", text: verdict[1] }),
      h("p", { text: `Answers took ${seconds(baseline.summary.answer_s)} with ${a}, ${seconds(candidate.summary.answer_s)} with ${b}.${unknown && same ? ` ${unknown} turns have no text.` : ""}` })),
    h("dl", { class: "tiles" },
      tile("Speed-up of answers", times(speedup), "turns that both have, without tools"),
      tile("Tokens per pass", `${number(baseline.summary.tokens_per_pass, 2)} → ${number(candidate.summary.tokens_per_pass, 2)}`),
      tile("Accepted", share(candidate.summary.acceptance), `${number(candidate.summary.accepted)} drafted tokens`),
      tile("Prompt reused", `${number(baseline.summary.cached_tokens)} → ${number(candidate.summary.cached_tokens)}`, "tokens")),
    panel("On one clock", h("div", {}, picture, legend([baseline, candidate].some(({ summary }) => Object.keys(summary.predicted_calls).length))), { note: "both begin at 0" }),
    panel("Turn by turn", scroller("Turn by turn", h("table", { class: "pairs" },
      h("thead", {}, h("tr", {}, h("th", { text: "turn" }), h("th", { text: "time" }), h("th", { class: "n", text: a }), h("th", { class: "n", text: b }), h("th", { class: "n", text: "ratio" }), h("th", { class: "n", text: "accepted" }), h("th", { text: "text" }))),
      h("tbody", {}, comparison.turns.map((pair, i) => h("tr", {},
        h("td", { text: `${i + 1}` }),
        h("td", { class: "two" }, turnBar(baseline.turns[i], max), turnBar(candidate.turns[i], max)),
        h("td", { class: "n", text: seconds(baseline.turns[i].seconds) }),
        h("td", { class: "n", text: seconds(candidate.turns[i].seconds) }),
        h("td", { class: "n", text: times(pair.ratio) }),
        h("td", { class: "n", text: share(candidate.turns[i].acceptance) }),
        h("td", { class: pair.same === null ? "note" : pair.same ? "good" : "bad", text: pair.same === null ? "not recorded" : pair.same ? "identical" : "differs" }))))))),
  );
  ended.push(lanes(picture, { end, label: `${a}: ${seconds(baseline.summary.seconds)}; ${b}: ${seconds(candidate.summary.seconds)}`,
    lanes: [{ name: `${a} · ${seconds(baseline.summary.seconds)}`, run: baseline }, { name: `${b} · ${seconds(candidate.summary.seconds)}`, run: candidate }] }));
}
