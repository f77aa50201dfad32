// The advice of `paceline advise`: per route whether to speculate, with what, and the settings to copy. The server has the
// report of --advice; any other can be opened from a file.

import { ApiError } from "../api.js";
import { bars, columns, line } from "../chart.js";
import { add, fill, h, panel, prose, scroller, tile } from "../dom.js";
import { counted, number, seconds, share, times } from "../format.js";
import { copyButton, fileButton } from "../open_file.js";

const TONES = { speculate: "good", "leave it off": "warn", "too little data": "" };
const isInterval = (value) => ["value", "low", "high"].every((name) => typeof value?.[name] === "number");
const isCandidate = (value) => [value?.tokens_per_pass, value?.speedup, value?.turn_speedup].every(isInterval);

/** What is wrong with a report, or null. */
export function isReport(value) {
  if (!Array.isArray(value?.routes) || !value.memory) return "is no report of advise: `paceline advise --json FILE` writes one.";
  const known = value.routes.every((one) => isCandidate(one?.best) && Array.isArray(one.candidates) && one.candidates.every(isCandidate));
  return known ? null : "is a report of another version: make it anew with `paceline advise --json FILE`.";
}

/** What a fitted drafter brings. few: conversations below which an interval means little. */
export const fitted = ({ gain, conversations }, few) => `${times(gain.value)} the best list, ${between(gain)[1]}, on ${counted(conversations, "other conversation")}${conversations < few ? ": too few for intervals to mean much" : ""}`;

const mib = (size) => (size === null ? "not known" : `${number(size / 2 ** 20)} MiB`);
const between = ({ value, low, high }) => [number(value, 2), `${number(low, 2)} to ${number(high, 2)}`];

export async function mount(root, api) {
  const body = h("div"), charts = [];
  const end = () => charts.forEach((one) => one.destroy());
  let opened = false; // a file: what the server answers later does not replace it
  const show = (report, source) => { charts.splice(0).forEach((one) => one.destroy()); fill(body); draw(body, report, source, api, charts); };
  const open = fileButton("Open a report…", isReport, (report, name) => { opened = true; api.showError(null); show(report, name); }, api.showError);
  root.append(h("div", { class: "row spread" }, h("h1", { text: "Advice" }), open), body);
  const { report, configured } = await api.get("/page/advice");
  const problem = report && isReport(report);
  if (opened) return end;
  if (problem) api.showError(new ApiError(`The report of \`--advice\` ${problem}`));
  else if (report) show(report, "");
  else fill(body, h("div", { class: "empty long" },
    h("p", {}, prose(configured ? "The server has a report, for operators only." : "Speculation pays off on some traffic and not on other. `paceline advise` measures it on yours:")),
    !configured && h("pre", { class: "config", text: `paceline advise --target ${api.about.model} \\\n  --store ~/.cache/paceline/traces.db \\\n  --json advice.json` }),
    h("p", {}, prose("Start the server with `--advice advice.json`, or open the file here. It stays in this browser."))));
  return end;
}

function draw(root, report, source, api, charts) {
  const machine = Object.entries(report.machine ?? {}).map(([name, value]) => `${name}: ${value}`).join(" · ");
  add(root,
    h("p", { class: "note lead", text: `${report.target}${source ? ` · ${source}` : ""} · ${machine}` }),
    report.busy && h("div", { class: "banner warn" }, h("p", { text: "Speed-ups are provisional: no two measurements of a pass agreed, or other processes ran beside them. Tokens per pass do not depend on it." })),
    report.routes_file && panel("Routes file", config(report.routes_file, "Routes file", "Copy this config", api), { note: "for paceline serve --routes" }),
    ...report.routes.map((one) => route(one, report, api, charts)),
    memory(report.memory),
    report.not_compared && h("p", { class: "note", text: `${report.not_compared}.` }));
}

/** Text with a button that copies it. */
function config(text, name, title, api) {
  const shown = h("pre", { class: "config", tabindex: 0, "aria-label": name, role: "region", text });
  return h("div", { class: "copyable" }, shown, copyButton(title, () => text, api, "primary"));
}

function route(one, report, api, charts) {
  const { best, workload: w } = one, flags = report.flags?.[one.route];
  const [rate, rates] = between(best.tokens_per_pass), [gain, gains] = between(best.speedup), [turn, turns] = between(best.turn_speedup);
  const byLength = h("div"), byLoad = h("div");
  const section = panel(one.route, h("div", {},
    h("p", { class: "verdict-line" }, h("span", { class: `badge ${TONES[one.decision] ?? ""}`, text: one.decision }), h("span", { text: one.reason })),
    h("dl", { class: "tiles" },
      tile("Tokens per pass", rate, rates), tile("Decoding", `${gain} ×`, gains), tile("Whole turns", `${turn} ×`, `${turns}, reading included`),
      tile("At once", number(one.concurrency), w.concurrency ? `${number(w.concurrency, 1)} recorded` : "not recorded")),
    one.config && config(one.config, `Settings of ${one.route}`, "Copy this route", api),
    h("div", { class: "grid charts" },
      h("figure", {}, h("figcaption", { class: "note", text: "drafts of a fixed length" }), byLength, h("ul", { class: "legend" }, [["tokens per pass", "--suffix"], ["speed-up", "--prediction"]].map(([text, color]) => h("li", {}, h("span", { class: "key", vars: { "--c": `var(${color})` } }), text)))),
      h("figure", {}, h("figcaption", { class: "note", text: "speed-up by outputs at once" }), byLoad)),
    h("details", {}, h("summary", { text: `${one.candidates.length} lists of drafters compared` }), candidates(one)),
    h("details", {}, h("summary", { text: "The traffic" }), h("dl", { class: "facts" }, [
      ["requests", `${number(w.requests)} in ${number(w.conversations)} conversations`],
      ["prompt tokens", `${number(w.prompt_tokens.median)} in the median, 95 % below ${number(w.prompt_tokens.p95)}`],
      ["answer tokens", `${number(w.output_tokens.median)} in the median, 95 % below ${number(w.output_tokens.p95)}`],
      ["JSON in answers", share(w.json_share)], ["repeated in answers", share(w.repetition)], ["prompt seen before", share(w.prefix_overlap)], ["temperature", number(w.temperature, 2)],
      ["a turn, plain", `${seconds(one.prefill_ms / 1000)} until its first token, ${seconds(one.decode_ms / 1000)} after it`],
      ["replayed", `${number(one.outputs)} outputs of ${number(one.replayed)} conversations`],
      ...(one.training ? [["with a fitted drafter", fitted(one.training, report.min_conversations)]] : []),
    ].map(([name, value]) => [h("dt", { text: name }), h("dd", { text: value })]))),
    flags && h("details", {}, h("summary", { text: "Settings for other engines" }), Object.entries(flags).filter(([, text]) => text).map(([engine, text]) =>
      h("div", { class: "engine" }, h("h3", { text: engine }), config(text, `Settings of ${one.route} for ${engine}`, "Copy", api),
        (report.flag_notes?.[one.route]?.[engine] ?? []).map((note) => h("p", { class: "note", text: `${note}.` })))))));
  charts.push(
    line(byLength, { height: 180, label: `Drafts of a fixed length, route ${one.route}`, x: { format: number }, y: { min: 0, format: (value) => `${value} ×` }, rules: [{ y: 1, label: "plain" }],
      series: [{ color: "--suffix", points: one.lengths.map((p) => [p.draft_length, p.tokens_per_pass]) }, { color: "--prediction", points: one.lengths.map((p) => [p.draft_length, p.speedup]) }] }),
    columns(byLoad, { height: 180, label: `Speed-up by outputs at once, route ${one.route}`, y: { format: (value) => `${value} ×` },
      columns: one.loads.map((p) => ({ label: `${p.concurrency}`, value: p.speedup, title: `${p.concurrency} at once: ${times(p.speedup)}` })) }));
  return section;
}

function candidates(one) {
  const same = (a, b) => a.max_draft === b.max_draft && a.drafters.join() === b.drafters.join();
  return scroller(`Lists of drafters, ${one.route}`, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { text: "drafters" }), ["length", "tokens per pass", "decoding", "whole turns"].map((text) => h("th", { class: "n", text })), h("th", { text: "accepted" }))),
    h("tbody", {}, one.candidates.map((c) => h("tr", { class: same(c, one.best) ? "best" : "" },
      h("td", {}, h("span", { class: "row tight" }, c.drafters.map((name) => h("span", { class: `swatch s-${name}`, text: name })))),
      h("td", { class: "n", text: number(c.max_draft) }), h("td", { class: "n", text: number(c.tokens_per_pass.value, 2) }), h("td", { class: "n", text: times(c.speedup.value) }), h("td", { class: "n", text: times(c.turn_speedup.value) }),
      h("td", { text: Object.entries(c.accepted_by_source).map(([name, count]) => `${name} ${number(count)}`).join(", ") }))))));
}

function memory(m) {
  const rows = [...Object.entries(m.target).map(([use, size]) => [`target: ${use}`, size, "--accent"]), ...Object.entries(m.drafters).map(([name, size]) => [`drafter ${name}`, size, "--model"]),
    ["KV cache as set", m.cache, "--prediction"], [`KV cache for ${m.concurrency} at once, ${number(m.tokens)} tokens each`, m.cache_needed, "--prediction"], ["free on the device now", m.free, "--other"]];
  return panel("Memory", h("div", {}, bars(rows.map(([label, size, color]) => ({ label, value: size ?? 0, text: mib(size), color })), { label: "Memory" }), h("p", { class: "verdict-line", text: `${m.verdict[0].toUpperCase()}${m.verdict.slice(1)}.` })));
}
