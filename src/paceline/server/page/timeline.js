// Time lines of agent runs in plain SVG. A phase of all turns is one path: 200 turns are a few elements.

import { chart, ticks } from "./chart.js";
import { s } from "./dom.js";
import { seconds } from "./format.js";

/** In the order of a turn. `tools` and `client` are the time between turns. */
export const PHASES = [
  { name: "queue", title: "waiting", color: "--line-strong" },
  { name: "prefill", title: "reading the prompt", color: "--prediction" },
  { name: "draft", title: "drafting", color: "--grammar" },
  { name: "verify", title: "passes of the target", color: "--suffix" },
  { name: "other", title: "rest", color: "--other" },
];
export const PAUSES = [
  { name: "tools", title: "tools", color: "--edge", thin: true },
  { name: "client", title: "user or client", color: "--line-strong", thin: true },
];

const LANE = 30, NAME = 16, MARK = 14, AXIS = 22, LEFT = 2, RIGHT = 10;

const box = (x, width, y, height) => `M${x.toFixed(2)} ${y}h${width.toFixed(2)}v${height}h${(-width).toFixed(2)}z`;

/**
 * Runs on one clock, one lane each. lanes: [{ name, run, onturn(index) }], `end`: the seconds that the clock shows.
 * Each run begins at 0.
 */
export function lanes(container, options) {
  const step = ({ lanes: list }) => MARK + LANE + 6 + (list.some(({ name }) => name) ? NAME : 0);
  const sized = (given) => ({ ...given, height: given.lanes.length * step(given) + AXIS });
  return chart(container, sized(options), (svg, { lanes: list, end }, width, total) => {
    const high = step({ lanes: list });
    const x = (at) => LEFT + (at / (end || 1)) * (width - LEFT - RIGHT);
    for (const value of ticks(0, end || 1, Math.max(2, Math.floor(width / 110)))) {
      svg.append(
        s("line", { class: "grid", x1: x(value), x2: x(value), y1: MARK, y2: total - AXIS }),
        s("text", { class: "tick", x: x(value), y: total - 6, "text-anchor": value ? "middle" : "start", text: value ? seconds(value) : "0" }),
      );
    }
    list.forEach((lane, i) => drawLane(svg, lane, x, (i + 1) * high - LANE - 6));
  });
}

function drawLane(svg, { name, run, onturn }, x, top) {
  const paths = new Map();
  const add = (phase, from, length, y, height) => {
    if (length > 0) paths.set(phase, (paths.get(phase) ?? "") + box(x(from), Math.max(0.6, x(from + length) - x(from)), y, height));
  };
  svg.append(s("text", { class: "name", x: LEFT, y: top - MARK - 3, text: name }));
  for (const turn of run.turns) {
    if (turn.pause_s) add(turn.pause, turn.start_s + turn.seconds, turn.pause_s, top + LANE / 2 - 2, 4);
    let at = turn.start_s;
    for (const { name: phase } of PHASES) {
      add(phase, at, turn.phases[phase], top, LANE);
      at += turn.phases[phase];
    }
  }
  for (const { name: phase, color } of [...PAUSES, ...PHASES]) {
    if (paths.has(phase)) svg.append(s("path", { class: "phase", d: paths.get(phase), vars: { fill: `var(${color})` } }));
  }
  const crowded = (x(run.summary.seconds) - x(0)) / run.turns.length < 14;
  run.turns.forEach((turn, i) => {
    const right = turn.predicted_calls.right ?? 0, wrong = (turn.predicted_calls.wrong ?? 0) + (turn.predicted_calls.unknown ?? 0);
    if (right + wrong) svg.append(mark(x(turn.start_s), top - 3, right > 0, crowded));
    const hit = s("rect", { class: "hit", x: x(turn.start_s), width: Math.max(3, x(turn.start_s + turn.seconds) - x(turn.start_s)), y: top, height: LANE },
      s("title", { text: turnTitle(turn, i) }));
    if (onturn) hit.addEventListener("click", () => onturn(i));
    svg.append(hit);
  });
}

/** Predicted calls: filled where one was right; a stroke where there is no room, longer where right. */
const mark = (x, y, right, crowded) => s("path", { class: right ? "foreseen right" : "foreseen", d: crowded ? `M${x} ${y}v${right ? -8 : -4}` : `M${x} ${y - 6}l4 4l-4 4l-4 -4z` });

const turnTitle = (turn, i) => [
  `Turn ${i + 1}: ${seconds(turn.seconds)}`,
  ...PHASES.filter(({ name }) => turn.phases[name] > 0).map(({ name, title }) => `${title}: ${seconds(turn.phases[name])}`),
].join("\n");

/** One turn as a bar from 0, `max` seconds long at most. */
export function turnBar(turn, max) {
  const height = 14, svg = s("svg", { class: "turn-bar", viewBox: `0 0 1000 ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": PHASES.map(({ name, title }) => `${title} ${seconds(turn.phases[name])}`).join(", ") });
  let at = 0;
  for (const { name, color } of PHASES) {
    const length = (turn.phases[name] / (max || 1)) * 1000;
    if (length > 0) svg.append(s("rect", { x: at, width: Math.max(1, length), y: 0, height, vars: { fill: `var(${color})` } }));
    at += length;
  }
  return svg;
}

/** The rounds of one turn: draft and pass side by side at their time, as high as the tokens they brought. */
export function rounds(container, { trace, label }) {
  const most = Math.max(1, ...trace.rounds.map((r) => r.committed));
  return chart(container, { height: 110, label }, (svg, _, width, height) => {
    const end = trace.seconds || 1, bottom = height - AXIS;
    const x = (at) => LEFT + (at / end) * (width - LEFT - RIGHT);
    for (const value of ticks(0, end, Math.max(2, Math.floor(width / 110)))) {
      svg.append(s("text", { class: "tick", x: x(value), y: height - 6, "text-anchor": value ? "middle" : "start", text: value ? seconds(value) : "0" }));
    }
    svg.append(s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom }));
    for (const r of trace.rounds) {
      const high = 10 + (bottom - 22) * (r.committed / most);
      const drafted = x(r.at_s + r.draft_us / 1e6), from = x(r.at_s), to = x(r.at_s + (r.draft_us + r.target_us) / 1e6);
      const group = s("g", { class: "round" }, s("title", { text: roundTitle(r) }));
      if (r.draft_us) group.append(s("rect", { x: from, width: Math.max(0.8, drafted - from), y: bottom - high, height: high, vars: { fill: "var(--grammar)" } }));
      group.append(s("rect", { x: drafted, width: Math.max(0.8, to - drafted), y: bottom - high, height: high, vars: { fill: r.phase === "prefill" ? "var(--prediction)" : "var(--suffix)" } }));
      svg.append(group);
    }
  });
}

const roundTitle = (r) => [
  `Round ${r.index}: ${r.committed} ${r.committed === 1 ? "token" : "tokens"}`,
  r.drafted ? `${r.accepted} of ${r.drafted} drafted tokens accepted (${r.sources.map(([name, count]) => `${name} ${count}`).join(", ")})` : "no draft",
  `draft ${seconds(r.draft_us / 1e6)}, pass ${seconds(r.target_us / 1e6)}, ${r.rows} rows of ${r.batch}`,
].join("\n");
