// The release gate: verdict, checks, evidence, pairs. In `paceline gate serve` it follows the experiments; everywhere it
// opens a report of `paceline gate run --json`. Every figure is the gate's own.

import { columns, line, scatter } from "../chart.js";
import { add, fill, h, panel, prose, s, scroller, tile } from "../dom.js";
import { clock, number, seconds, share, times } from "../format.js";
import { fileButton } from "../open_file.js";

const EVERY_MS = 10000;
const TONES = { promote: "good", hold: "warn", "roll back": "bad" };
const STATES = { pass: ["good", "✓ proven"], fail: ["bad", "✗ harmful"], undecided: ["warn", "… undecided"], skipped: ["", "– not measured"] };
const isReport = (value) => (value && typeof value === "object" && Array.isArray(value.findings) && typeof value.verdict === "string"
  ? null : "is no report of the gate: `paceline gate run --json FILE` writes one.");

export async function mount(root, api) {
  const served = Boolean(api.about.views); // the gate's own process
  const head = h("div"), body = h("div");
  let stop = null, charts = [], last = "", opened = false;
  const end = () => { charts.forEach((one) => one.destroy()); charts = []; };

  function show(report, source) {
    const text = JSON.stringify(report);
    if (text === last) return; // nothing new
    last = text;
    end();
    body.style.setProperty("min-height", `${body.offsetHeight}px`); // until the charts are drawn: what is read stays in sight
    fill(body);
    draw(body, report, source, api, charts);
    requestAnimationFrame(() => requestAnimationFrame(() => body.style.removeProperty("min-height")));
    if (report.headline !== source.headline) api.announce(report.headline);
    source.headline = report.headline;
  }

  function follow(experiment) {
    stop?.();
    last = "";
    const source = looked({ path: `/page/gate/${encodeURIComponent(experiment)}` });
    stop = api.poll(source.path, EVERY_MS, (report) => { api.showError(null); show(report, source); }, api.showError);
  }

  const open = fileButton("Open a report…", isReport, (report, name) => { opened = true; api.showError(null); stop?.(); stop = null; last = ""; show(report, looked({ name })); }, api.showError);
  root.append(h("div", { class: "row spread" }, h("h1", { text: "Release gate" }), open), head, body);
  if (!served) {
    fill(body, h("div", { class: "empty long" },
      h("p", {}, prose("The gate tells whether a candidate may replace a baseline. `paceline gate serve` compares live traffic and has this page at its own address; `paceline gate run` compares recorded requests:")),
      h("pre", { class: "config", text: `paceline gate run --traces requests.jsonl \\\n  --baseline http://HOST:PORT \\\n  --candidate ${location.origin} \\\n  --json report.json` }),
      h("p", { text: "Open its report here. It stays in this browser." })));
    return () => end();
  }
  const { experiments } = await api.get("/page/gate");
  if (opened) return () => end(); // a file, in the meantime
  if (!experiments.length) fill(body, h("p", { class: "empty", text: "No route has a mirror: without a candidate there is nothing to compare." }));
  else {
    const chosen = experiments.find(({ experiment }) => experiment === api.rest[0]) ?? experiments.find(({ aa }) => !aa) ?? experiments[0];
    if (experiments.length > 1) fill(head, h("nav", { class: "choices", "aria-label": "Experiments" }, experiments.map(({ experiment, aa }) =>
      h("a", { href: `#/gate/${encodeURIComponent(experiment)}`, "aria-current": experiment === chosen.experiment ? "true" : null, text: aa ? `${experiment} (A/A)` : experiment }))));
    follow(chosen.experiment);
  }
  return () => { stop?.(); end(); };
}

/** Where a report comes from (the path at a gate, or the name of a file), and what the reader has opened in it. */
const looked = (from) => ({ ...from, pair: null, open: new Set() });

function draw(root, report, source, api, charts) {
  const all = report.findings.filter((finding) => finding.segment === "all");
  const measured = all.filter((finding) => finding.status !== "skipped");
  const skipped = all.filter((finding) => finding.status === "skipped");
  const segments = report.findings.filter((finding) => finding.segment !== "all" && finding.status !== "skipped");
  const pair = h("div", { id: "pair" });
  const details = (name, title, content) => h("details", { open: source.open.has(name), ontoggle: (event) => source.open[event.target.open ? "add" : "delete"](name) },
    h("summary", { text: title }), content);
  const showPair = (shown) => {
    fill(pair, pairView(shown));
    const choice = root.querySelector("select");
    if (choice) choice.value = shown.id;
  };
  const openPair = async (id) => {
    source.pair = id;
    const known = (report.shown_pairs ?? []).find((one) => one.id === id);
    try {
      if (known) showPair(known);
      else if (source.path) showPair(await api.get(`${source.path}/pairs/${encodeURIComponent(id)}`));
      else fill(pair, h("p", { class: "note", text: `The report does not hold the pair ${id}; gate run --pairs writes all.` }));
    } catch (error) { api.showError(error); }
  };
  const choosePair = async (id) => { await openPair(id); pair.scrollIntoView({ block: "nearest" }); };
  root.append(banner(report, source));
  if (report.experiment) root.append(health(report));
  add(root,
    panel("Checks", h("div", {}, checks(measured, false), h("p", { class: "note", text: "Wide: the interval; thick: the estimate; grey: no difference; red: the margin. Promotion waits for checks with a star. Intervals hold however often somebody looks." }),
      skipped.length > 0 && details("skipped", `${skipped.length} not measured`, h("ul", { class: "plain" }, skipped.map((finding) => h("li", { class: "note", text: `${finding.check}: ${finding.message}` }))))),
    { note: report.policy_hash ? `policy ${report.policy_hash}` : "" }),
    segments.length > 0 && panel("By route and cohort", details("segments", `${segments.length} checks`, checks(segments, true))),
    evidence(report, choosePair, charts),
    panel("Pairs", h("div", {}, pairList(report, choosePair), pair), { note: pairNote(report) }),
  );
  if (source.pair) openPair(source.pair);
  else if (report.shown_pairs?.length) fill(pair, pairView(report.shown_pairs[0]));
  if (report.changes?.length) root.append(panel("Changes of the rollout", h("ul", { class: "plain" }, [...report.changes].reverse().slice(0, 20).map((change) =>
    h("li", {}, h("span", { class: "note", text: clock(change.created) }), ` ${share(change.from_share)} → ${share(change.to_share)} `, h("span", { text: `${change.actor}: ${change.reason}` }))))));
}

function banner(report, source) {
  const { verdict, pairs, missing_pairs: missing, about = {} } = report;
  const facts = Object.entries(about).map(([name, value]) => [h("dt", { text: name }), h("dd", { text: `${value}` })]);
  return h("section", { class: `banner ${TONES[verdict] ?? ""}`, "aria-label": "Verdict" },
    h("p", { class: "banner-title", text: report.title ?? verdict }),
    h("p", { text: `After ${number(pairs)} pairs${missing ? `; about ${number(missing)} more are needed` : verdict === "hold" ? "; how many more are needed cannot be told yet" : ""}.` }),
    missing > 0 && h("div", { class: "progress", role: "img", "aria-label": `${number(pairs)} pairs, about ${number(missing)} missing` },
      h("span", { class: "bar-fill", vars: { "--share": pairs / (pairs + missing), "--c": "var(--warn)" } })),
    h("ul", { class: "reasons" }, (report.reasons ?? []).slice(0, 6).map((reason) => h("li", { text: reason })),
      report.reasons?.length > 6 && h("li", { class: "note", text: `and ${report.reasons.length - 6} more` })),
    h("dl", { class: "facts small" }, facts, source.name && [h("dt", { text: "file" }), h("dd", { text: source.name })]));
}

function health({ experiment: one }) {
  const { health: mirror, rollout } = one;
  const lost = Object.entries(mirror.outcomes).filter(([outcome]) => outcome !== "recorded");
  return h("dl", { class: "tiles" },
    rollout && tile("Candidate serves", share(rollout.share), `${rollout.state.replace("_", " ")}; stages ${one.stages.map((stage) => share(stage)).join(", ")}`),
    tile("Mirrored", share(mirror.recorded_share), `of ${number(mirror.requests)} requests here; set to ${share(one.mirrored_share)} of conversations`),
    tile("Recorded", number(mirror.outcomes.recorded ?? 0), "second answers by this process"),
    tile("Not recorded", lost.length ? lost.map(([, count]) => number(count)).join(" + ") : "0", lost.map(([outcome]) => outcome.replace("_", " ")).join(" + ") || "nothing was dropped"),
    tile("In flight", number(mirror.running), `${number(mirror.waiting)} wait`));
}

function checks(findings, segmented) {
  return scroller(segmented ? "Checks by route and cohort" : "All checks", h("table", { class: "checks" },
    h("thead", {}, h("tr", {}, h("th", { text: "check" }), segmented && h("th", { text: "where" }), h("th", { text: "state" }), h("th", { class: "n", text: "estimate" }), h("th", { text: "interval against margin" }), h("th", { class: "n", text: "interval" }), h("th", { class: "n", text: "margin" }), h("th", { class: "n", text: "pairs" }), h("th", { class: "n", text: "missing" }))),
    h("tbody", {}, findings.map((finding) => {
      const [tone, state] = STATES[finding.status] ?? ["", finding.status];
      const text = finding.text ?? {};
      return h("tr", {},
        h("td", {}, h("span", { text: finding.check }), finding.required && h("span", { title: "promotion waits for it", text: " *" }), h("div", { class: "note", text: finding.message })),
        segmented && h("td", { text: finding.segment }),
        h("td", { class: `state ${tone}`, text: state }),
        h("td", { class: "n", text: text.estimate ?? "–" }),
        h("td", {}, finding.bar && bar(finding.bar, tone, `${text.interval}, margin ${text.margin}`)),
        h("td", { class: "n", text: text.interval ?? "–" }), h("td", { class: "n", text: text.margin ?? "–" }),
        h("td", { class: "n", text: number(finding.pairs) }), h("td", { class: "n", text: finding.missing_pairs ? number(finding.missing_pairs) : "" }));
    }))));
}

const bar = ({ left, width, estimate, margin, zero }, tone, label) => s("svg", { class: `check-bar ${tone}`, viewBox: "0 0 100 16", preserveAspectRatio: "none", role: "img", "aria-label": label },
  s("line", { class: "zero", x1: zero, x2: zero, y1: 0, y2: 16 }),
  s("rect", { class: "interval", x: left, width, y: 5, height: 6 }),
  s("line", { class: "margin", x1: margin, x2: margin, y1: 0, y2: 16 }),
  s("line", { class: "estimate", x1: estimate, x2: estimate, y1: 2, y2: 14 }));

function evidence(report, openPair, charts) {
  const grid = h("div", { class: "grid wide" });
  if (report.scatter) {
    const place = h("div");
    grid.append(panel("Each pair", place, { note: "time per token; below the line the candidate is faster" }));
    const ms = (value) => `${value} ms`;
    charts.push(scatter(place, { height: 300, equal: true, label: `Time per token of ${report.scatter.points.length} pairs, baseline against candidate`,
      x: { log: true, format: ms, label: "baseline" }, y: { log: true, format: ms, label: "candidate" },
      points: report.scatter.points.map((point) => ({ x: point.baseline_ms, y: point.candidate_ms, color: point.same === false ? "--bad" : "--accent",
        title: `${point.id}: ${point.baseline_ms.toFixed(2)} → ${point.candidate_ms.toFixed(2)} ms${point.same === false ? ", texts differ" : ""}`, onclick: () => openPair(point.id) })) }));
  }
  for (const one of report.evidence ?? []) {
    const place = h("div");
    const controls = (report.aa ?? []).flatMap((aa) => aa.evidence.filter(({ name }) => name === one.name).map((found) => [aa.experiment, found]));
    grid.append(panel(`Evidence: ${one.name}`, h("div", {}, place, controls.length > 0 && h("p", { class: "note", text: `Grey: ${controls.map(([name]) => name).join(", ")}, the baseline against itself (A/A). It should stay around 1.` })),
      { note: `candidate over baseline, after each of ${number(one.last)} pairs` }));
    const series = (found, color, dashed) => ({ color, dashed, points: found.pairs.map((n, i) => [n, found.mean[i]]), band: found.pairs.map((n, i) => [n, found.lower[i], found.upper[i]]) });
    charts.push(line(place, { height: 300, label: `Ratio of ${one.name}: ${one.mean.at(-1).toFixed(3)}, interval ${one.lower.at(-1).toFixed(3)} to ${one.upper.at(-1).toFixed(3)}, margin ${one.margin}`,
      series: [...controls.map(([, found]) => series(found, "--other", true)), series(one, "--accent", false)],
      x: { format: (value) => number(value) }, y: { format: (value) => `${value} ×` }, rules: [{ y: 1, label: "no difference" }, { y: one.margin, label: "margin", color: "--bad" }] }));
  }
  if (report.positions?.length) {
    const place = h("div");
    grid.append(panel("Acceptance by position", place, { note: "drafts accepted at least so far" }));
    charts.push(columns(place, { height: 300, label: "Acceptance by position", y: { max: 1, format: (value) => share(value) },
      columns: report.positions.map((value, i) => ({ label: `${i + 1}`, value, title: `position ${i + 1}: ${share(value, 1)}` })) }));
  }
  return grid;
}

const pairNote = ({ identical, diverged }) => (identical === undefined ? "" : `${number(identical)} identical, ${number(diverged)} differ`);

function pairList(report, openPair) {
  const pairs = report.shown_pairs ?? [];
  if (!pairs.length) return h("p", { class: "note", text: "The report holds no pairs." });
  const label = (pair) => `${pair.same === false ? "≠" : pair.same ? "=" : "·"} ${pair.id} (${times(pair.tpot_ratio ?? pair.end_to_end_ratio)})`;
  return h("div", { class: "row" }, h("label", { for: "pair-choice", text: "Pair, and time of candidate over baseline" }),
    h("select", { id: "pair-choice", onchange: (event) => openPair(event.target.value) }, pairs.map((pair) => h("option", { value: pair.id, text: label(pair) }))));
}

function pairView(pair) {
  const at = pair.divergence?.character ?? null;
  const verdict = pair.same === null ? ["note", "Texts cannot be compared: a leg failed, or texts are not recorded."] : pair.same ? ["good", "Identical text"]
    : ["bad", `First difference at character ${number(at)}${pair.divergence?.margin === null || pair.divergence?.margin === undefined ? "" : `; the baseline's token led by ${pair.divergence.margin.toFixed(3)}`}`];
  const end = Math.max(pair.baseline.seconds, pair.candidate.seconds) || 1;
  return h("div", { class: "pair" },
    h("p", {}, h("span", { class: verdict[0], text: verdict[1] }), h("span", { class: "note", text: ` ${pair.id}, ${clock(pair.created)}, ${pair.order.replace("_", " ")}` })),
    h("div", { class: "legs" }, ["baseline", "candidate"].map((arm) => legView(arm, pair[arm], at, end))));
}

function legView(arm, leg, at, end) {
  const facts = [["first token", seconds(leg.ttft_s)], ["per token", seconds(leg.tpot_s)], ["all", seconds(leg.seconds)], ["tokens", number(leg.completion_tokens)], ["passes", number(leg.passes)],
    ["accepted", leg.draft_tokens === null ? "–" : `${number(leg.accepted_tokens)} of ${number(leg.draft_tokens)}`], ["finish", leg.error ?? leg.finish_reason ?? "–"], ...Object.entries(leg.scores).map(([name, value]) => [name, number(value, 2)])];
  return h("section", { class: "leg", "aria-label": arm }, h("h3", { text: `${arm}${leg.upstream && leg.upstream !== arm ? `: ${leg.upstream}` : ""}` }),
    h("p", { class: "note", text: facts.map(([name, value]) => `${name} ${value}`).join(" · ") }),
    s("svg", { class: "chunks", viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img", "aria-label": `${leg.chunk_s.length} chunks in ${seconds(leg.seconds)}` },
      s("path", { d: leg.chunk_s.map((t, i) => `M${((t / end) * 1000).toFixed(1)} 16v-${Math.min(16, 4 + 2 * (leg.chunk_tokens[i] ?? 1))}`).join("") })),
    leg.output === null ? h("p", { class: "note", text: "The text is not recorded, or not shown to this key." })
      : h("pre", { class: "leg-text" }, at === null ? leg.output : [leg.output.slice(0, at), h("mark", { text: leg.output.slice(at) || "∅" })], leg.cut && "…"));
}
