// What runs now and for whom, the figures of /metrics, and the last hour of the trace store.

import { bars, columns, line } from "../chart.js";
import { fill, h, panel, scroller, tile } from "../dom.js";
import { number, seconds, share, times } from "../format.js";

const EVERY_MS = 1000;
const HOUR_EVERY_MS = 15000;
const WINDOW_S = 120; // of the chart of the throughput
const STATES = { loading: "waiting for the model", preparing: "preparing", queued: "waiting", reading: "reading the prompt", writing: "writing" };

export function mount(root, api) {
  const tiles = h("dl", { class: "tiles" });
  const requests = h("div", { class: "requests" });
  const throughput = h("div"), accepted = h("div"), positions = h("div"), batch = h("div"), routes = h("div");
  const hourNote = h("p", { class: "note" }), perMinute = h("div"), firsts = h("div"), perToken = h("div");
  const inFlight = table("Requests in flight", ["Request", "Route", "Key", "Progress"], ["Tokens", "Per pass", "Per token", "Age"]), others = h("p", { class: "note" });
  const byRoute = table("Routes", ["Route"], ["Speed-up", "Tokens per pass", "Drafted per pass", "Accepted", "Plain rounds", "Batch"]);
  let hour = null; // sums of the last hour, once they are known
  const history = []; // { at, tokens } of the last WINDOW_S
  const charts = {
    throughput: line(throughput, { label: "Tokens a second, the last two minutes", height: 170, series: [], y: { min: 0, format: (v) => number(v) } }),
    positions: columns(positions, { label: "Share of drafted tokens that were accepted, by their position in the draft", height: 170, y: { max: 1, format: (v) => share(v) } }),
    batch: columns(batch, { label: "Passes by the number of outputs in them", height: 170, y: { format: (v) => number(v) } }),
    perMinute: line(perMinute, { label: "Tokens written in each minute of the last hour", height: 150, series: [], y: { min: 0, format: (v) => number(v) } }),
    firsts: line(firsts, { label: "Median time to the first token in each minute of the last hour", height: 150, series: [], y: { min: 0, format: seconds } }),
    perToken: line(perToken, { label: "Median time per token in each minute of the last hour", height: 150, series: [], y: { min: 0, format: seconds } }),
  };
  root.append(
    h("h1", { text: "Live" }), tiles,
    panel("In flight", requests, { note: api.about.operator ? "requests of everybody" : "requests of your key" }),
    h("div", { class: "grid" },
      panel("Throughput", throughput, { note: "tokens/s, two minutes" }),
      panel("Accepted by position", positions, { note: "share of drafted tokens, since the start" }),
      panel("Accepted by drafter", accepted, { note: "since the start" }),
      panel("Batch", batch, { note: "passes by outputs in them, since the start" })),
    h("div", { class: "spaced" }, panel("Routes", routes, { note: "recent answers, against plain decoding" })),
    panel("Last hour", h("div", {}, hourNote, h("div", { class: "thirds wide" },
      h("figure", {}, h("figcaption", { class: "note", text: "tokens per minute" }), perMinute),
      h("figure", {}, h("figcaption", { class: "note", text: "time to the first token, median" }), firsts),
      h("figure", {}, h("figcaption", { class: "note", text: "time per token, median" }), perToken))), { note: "from the trace store" }),
  );

  const rate = () => {
    const [first, last] = [history[0], history.at(-1)];
    const recent = history.findLast(({ at }) => at <= last.at - 5) ?? first;
    return last.at > recent.at ? (last.tokens - recent.tokens) / (last.at - recent.at) : null;
  };

  function show({ at, requests: inFlight, more, figures }) {
    api.showError(null);
    const restarted = history.length && figures.generation_tokens < history.at(-1).tokens;
    if (restarted) history.length = 0;
    history.push({ at, tokens: figures.generation_tokens });
    while (history[0].at < at - WINDOW_S) history.shift();
    const drafted = figures.acceptance.drafter.reduce((sum, one) => sum + one.drafted, 0);
    const kept = figures.acceptance.drafter.reduce((sum, one) => sum + one.accepted, 0);
    fill(tiles,
      tile("Running", number(figures.running), `${number(figures.waiting)} waiting`),
      tile("Throughput", rate() === null ? "–" : `${number(rate())} /s`, `${number(figures.generation_tokens)} in all`),
      tile(`First token${hour ? ", 1 h" : ""}`, seconds((hour ?? figures).first_token_s.p50), `p95 ${seconds((hour ?? figures).first_token_s.p95)}`),
      tile(`Per token${hour ? ", 1 h" : ""}`, seconds((hour ?? figures).token_s.p50), `p95 ${seconds((hour ?? figures).token_s.p95)}`),
      tile("Tokens per pass", figures.tokens_per_pass === null ? "–" : figures.tokens_per_pass.toFixed(2), `${number(figures.rounds)} rounds`),
      tile("Accepted", drafted ? share(kept / drafted) : "–", `of ${number(drafted)} drafted`),
      tile("Plain rounds", figures.rounds ? share(figures.plain_rounds / figures.rounds) : "–", "without a draft"),
      tile("KV cache", share(figures.cache_use), `${share(figures.cached_share)} prefix hits`));
    drawRequests(inFlight, more);
    const points = history.slice(1).map((one, i) => [one.at - at, one.at > history[i].at ? (one.tokens - history[i].tokens) / (one.at - history[i].at) : null]);
    charts.throughput.update({ series: [{ name: "tokens/s", points, area: true, color: "--accent" }], x: { min: -WINDOW_S, max: 0, format: (v) => (v ? `${-v} s ago` : "now"), count: 3 } });
    charts.positions.update({ columns: figures.acceptance.position.sort((a, b) => parseInt(a.name) - parseInt(b.name)).map((one) => ({
      label: one.name.endsWith("+") ? one.name : `${Number(one.name) + 1}`, value: one.accepted / one.drafted, color: "--accent", title: `${number(one.accepted)} of ${number(one.drafted)}` })) });
    charts.batch.update({ columns: batchColumns(figures.batch_size) });
    fill(accepted, figures.acceptance.drafter.length ? bars(figures.acceptance.drafter.map((one) => ({
      label: one.name, value: one.accepted / one.drafted, color: `--${one.name}`, text: `${share(one.accepted / one.drafted)} of ${number(one.drafted)}` })), { max: 1, label: "Accepted by drafter" }) : nothing("No draft yet."));
    drawRoutes(figures);
  }

  function drawRequests(list, more) {
    if (!list.length) { fill(requests, nothing("Nothing is running.")); return; }
    fill(inFlight.rows, list.map((one) => h("tr", {},
      h("td", {}, h("code", { text: one.id.slice(0, 18), title: `${one.id}, ${one.endpoint}` })),
      h("td", { text: one.route }), h("td", { text: one.client || "–" }), h("td", {}, progress(one)),
      h("td", { class: "n", text: one.output_tokens === undefined ? "–" : number(one.output_tokens) }),
      h("td", { class: "n", text: one.tokens_per_pass ? one.tokens_per_pass.toFixed(2) : "–" }),
      h("td", { class: "n", text: seconds(one.token_s) }),
      h("td", { class: "n", text: seconds(one.seconds) }))));
    others.textContent = more > 0 ? `and ${number(more)} more` : "";
    if (!inFlight.element.isConnected) fill(requests, inFlight.element, others);
  }

  function drawRoutes(figures) {
    const names = Object.keys(figures.routes);
    if (!names.length) { fill(routes, nothing("No answer of more than one token yet.")); return; }
    fill(byRoute.rows, names.map((name) => {
      const one = figures.routes[name];
      return h("tr", {}, h("td", { text: name }), [times(one.speedup), one.tokens_per_pass.toFixed(2), one.drafted_per_pass.toFixed(2), share(one.acceptance), share(one.plain_rounds), one.batch.toFixed(1)].map((text) => h("td", { class: "n", text })));
    }));
    if (!byRoute.element.isConnected) fill(routes, byRoute.element);
  }

  function showHour({ stored, since, until, minutes, total }) {
    hour = total?.requests ? total : null;
    hourNote.textContent = !stored ? "This server keeps no traces (--store none)." : !total ? "Only operators see it." :
      `${number(total.requests)} requests, ${number(total.output_tokens)} tokens, ${number(total.refused)} refused, ${number(total.errors)} failed; ` +
      `${total.tokens_per_pass?.toFixed(2) ?? "–"} tokens per pass, ${share(total.acceptance)} of drafted accepted, first token ${seconds(total.first_token_s.p50)}, per token ${seconds(total.token_s.p50)} (medians)`;
    const begin = minutes.length ? Math.max(since, minutes[0].at - 60) : since;
    const x = total ? { min: begin, max: until, format: minute, ticks: roundMinutes(begin, until) } : {};
    const series = (name, color) => [{ name, color, area: name === "output_tokens", points: spread(minutes, name) }];
    charts.perMinute.update({ x, series: series("output_tokens", "--accent") });
    charts.firsts.update({ x, series: series("first_token_s", "--prediction") });
    charts.perToken.update({ x, series: series("token_s", "--model") });
  }

  const stops = [api.poll("/page/live", EVERY_MS, show, api.showError), api.poll("/page/hour", HOUR_EVERY_MS, showHour)];
  return () => { stops.forEach((stop) => stop()); Object.values(charts).forEach((chart) => chart.destroy()); };
}

const minute = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
/** At most five times between, at whole minutes. */
function roundMinutes(since, until) {
  const step = [60, 120, 300, 600, 900].find((one) => (until - since) / one <= 5) ?? 900;
  const first = Math.ceil(since / step) * step;
  return Array.from({ length: Math.max(0, Math.floor((until - first) / step) + 1) }, (_, i) => first + i * step);
}
/** A table whose rows are drawn anew while it keeps its scroll position and the keyboard's focus. */
function table(label, texts, numbers) {
  const rows = h("tbody"), head = (className) => (text) => h("th", { class: className, scope: "col", text });
  return { rows, element: scroller(label, h("table", {}, h("thead", {}, h("tr", {}, texts.map(head("")), numbers.map(head("n")))), rows)) };
}
const nothing = (text) => h("p", { class: "empty", text });

/** Minutes without a request are gaps. */
function spread(minutes, name) {
  const points = [];
  for (const one of minutes) {
    if (points.length && one.at - points.at(-1)[0] > 60) points.push([points.at(-1)[0] + 60, name === "output_tokens" ? 0 : null], ...(name === "output_tokens" ? [[one.at - 60, 0]] : []));
    points.push([one.at, one[name]?.p50 ?? (name === "output_tokens" ? one[name] : null)]);
  }
  return points;
}

function progress(one) {
  const reading = one.state === "reading";
  const [done, whole] = reading ? [one.read_tokens, one.prompt_tokens] : [one.output_tokens ?? 0, one.max_tokens ?? 1];
  const text = one.state === "writing" ? `${STATES.writing}, at most ${number(one.max_tokens)}` : STATES[one.state];
  return h("div", { class: "progress" }, h("progress", { max: whole, value: done, "aria-label": text }), h("span", { class: "note", text }));
}

function batchColumns(buckets) {
  let lower = 0;
  const last = buckets.findLastIndex(([, count]) => count > 0);
  return buckets.slice(0, last + 1).map(([bound, count]) => {
    const label = bound === "inf" ? `>${lower}` : bound - lower > 1 ? `${lower + 1}–${bound}` : `${bound}`;
    if (bound !== "inf") lower = bound;
    return { label, value: count, title: `${number(count)} passes`, color: "--ngram" };
  });
}
