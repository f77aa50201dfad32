// Charts in plain SVG: line, scatter, bars, columns, intervals. Each fills its container, is drawn again when that
// changes its width, and returns `{ update(options), destroy() }`. Every chart has a `label` for screen readers.

import { h, s } from "./dom.js";

const MARGIN = { top: 10, right: 12, bottom: 24, left: 46 };
const identity = (value) => `${value}`;

/** Draws now, at every update, and at every new width. */
export function chart(container, options, draw) {
  let latest = options, width = 0;
  const render = () => {
    if (width < 40) return;
    const svg = s("svg", { class: "chart", width, height: latest.height ?? 160, role: "img", "aria-label": latest.label ?? "" });
    draw(svg, latest, width, latest.height ?? 160);
    container.replaceChildren(svg);
  };
  const observer = new ResizeObserver(([entry]) => {
    const next = Math.floor(entry.contentRect.width);
    if (next !== width) { width = next; render(); }
  });
  observer.observe(container);
  return {
    update(next) { latest = { ...latest, ...next }; render(); },
    destroy() { observer.disconnect(); container.replaceChildren(); },
  };
}

/** Round values that cover low to high: at most about `count` of them. */
export function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i += 1) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Powers of ten between, with 2 and 5 where there are few. */
export function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) {
    for (const m of high / low < 100 ? [1, 2, 5] : [1]) {
      const value = Number((m * 10 ** e).toPrecision(6));
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found;
}

/** A mapping from [low, high] to [from, to], with its ticks. */
function scale(low, high, from, to, { log = false, count = 4, ticks: given = null } = {}) {
  if (!(high > low)) high = log ? low * 1.1 : low + 1;
  const f = log ? Math.log : identityNumber;
  const map = (value) => from + ((f(value) - f(low)) / (f(high) - f(low))) * (to - from);
  map.ticks = given ?? (log ? logTicks(low, high) : ticks(low, high, count));
  return map;
}
const identityNumber = (value) => value;

const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);

function axes(svg, x, y, box, options) {
  const xf = options.x?.format ?? identity, yf = options.y?.format ?? identity;
  y.ticks.forEach((value, i) => {
    const text = yf(value);
    if (i && text === yf(y.ticks[i - 1])) return; // between two numbers of the format
    svg.append(
      s("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }),
      s("text", { class: "tick", x: box.left - 8, y: y(value) + 4, "text-anchor": "end", text }),
    );
  });
  for (const value of x.ticks) {
    svg.append(s("text", { class: "tick", x: x(value), y: box.bottom + 17, "text-anchor": "middle", text: xf(value) }));
  }
  svg.append(s("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
}

const inner = (width, height, left = MARGIN.left) => ({ left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom });

/**
 * series: [{ name, points: [[x, y]], color: "--suffix", dashed, area, band: [[x, low, high]] }]; a y of null is a gap.
 * x, y: { format, min, max, log, count, ticks }. rules: [{ y, label, color }]: lines across.
 */
export function line(container, options) {
  return chart(container, options, (svg, { series = [], x: xo = {}, y: yo = {}, rules = [], ...rest }, width, height) => {
    const box = inner(width, height);
    const points = series.flatMap((one) => one.points);
    const bands = series.flatMap((one) => one.band ?? []);
    const xs = extent([...points.map((p) => p[0]), ...bands.map((b) => b[0])]);
    const ys = extent([...points.map((p) => p[1]), ...bands.flatMap((b) => [b[1], b[2]]), ...rules.map((r) => r.y)].filter((v) => v !== null && Number.isFinite(v)));
    if (!Number.isFinite(xs[0]) || !Number.isFinite(ys[0])) { empty(svg, width, height, rest.empty); return; }
    const x = scale(xo.min ?? xs[0], xo.max ?? xs[1], box.left, box.right, { count: xo.count ?? Math.max(2, Math.floor(width / 130)), log: xo.log, ticks: xo.ticks });
    const top = ys[1] + (ys[1] - Math.min(ys[0], yo.min ?? ys[0])) * 0.06;
    const y = scale(yo.min ?? ys[0], yo.max ?? (yo.log ? ys[1] : top || 1), box.bottom, box.top, { log: yo.log, count: yo.count ?? 3 });
    axes(svg, x, y, box, { x: xo, y: yo });
    for (const one of series) {
      const color = `var(${one.color ?? "--accent"})`;
      if (one.band?.length) {
        const there = one.band.map(([a, low]) => `${x(a).toFixed(1)},${y(low).toFixed(1)}`);
        const back = [...one.band].reverse().map(([a, , high]) => `${x(a).toFixed(1)},${y(high).toFixed(1)}`);
        svg.append(s("polygon", { class: "band", points: [...there, ...back].join(" "), vars: { fill: color } }));
      }
      for (const run of runs(one.points)) {
        const path = run.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
        if (one.area) svg.append(s("path", { class: "area", d: `${path}L${x(run.at(-1)[0]).toFixed(1)} ${box.bottom}L${x(run[0][0]).toFixed(1)} ${box.bottom}Z`, vars: { fill: color } }));
        svg.append(s("path", { class: one.dashed ? "stroke dashed" : "stroke", d: path, vars: { stroke: color } }));
        if (run.length === 1) svg.append(s("circle", { class: "dot", cx: x(run[0][0]), cy: y(run[0][1]), r: 2.5, vars: { fill: color } }));
      }
    }
    drawRules(svg, rules, y, box);
  });
}

function runs(points) {
  const found = [];
  let run = [];
  for (const point of [...points, [0, null]]) {
    if (point[1] !== null && Number.isFinite(point[1])) run.push(point);
    else if (run.length) { found.push(run); run = []; }
  }
  return found;
}

function drawRules(svg, rules, y, box) {
  for (const rule of rules) {
    const at = y(rule.y), crowded = rules.some((other) => y(other.y) < at && y(other.y) > at - 16); // no room above it
    svg.append(s("line", { class: "rule", x1: box.left, x2: box.right, y1: at, y2: at, vars: { stroke: `var(${rule.color ?? "--muted"})` } }));
    if (rule.label) svg.append(s("text", { class: "tick", x: box.right, y: crowded ? at + 12 : at - 4, "text-anchor": "end", text: rule.label }));
  }
}

const empty = (svg, width, height, text = "nothing yet") =>
  svg.append(s("text", { class: "tick", x: width / 2, y: height / 2, "text-anchor": "middle", text }));

/**
 * points: [{ x, y, title, color, onclick }]; equal: both axes have the same bounds, with the line y = x.
 * x, y: { format, log, label }.
 */
export function scatter(container, options) {
  return chart(container, options, (svg, { points = [], x: xo = {}, y: yo = {}, equal = false, ...rest }, width, height) => {
    const box = inner(width, height);
    if (!points.length) { empty(svg, width, height, rest.empty); return; }
    let xs = extent(points.map((p) => p.x)), ys = extent(points.map((p) => p.y));
    if (equal) xs = ys = [Math.min(xs[0], ys[0]), Math.max(xs[1], ys[1])];
    const pad = ([a, b], log) => (log ? [a / 1.05, b * 1.05] : [a - (b - a) * 0.04, b + (b - a) * 0.04]);
    const [x0, x1] = pad(xs, xo.log), [y0, y1] = pad(ys, yo.log);
    const x = scale(x0, x1, box.left, box.right, { log: xo.log });
    const y = scale(y0, y1, box.bottom, box.top, { log: yo.log });
    axes(svg, x, y, box, { x: xo, y: yo });
    if (equal) svg.append(s("line", { class: "rule", x1: x(x0), y1: y(y0), x2: x(x1), y2: y(y1), vars: { stroke: "var(--muted)" } }));
    for (const point of points) {
      const dot = s("circle", { class: point.onclick ? "dot click" : "dot", cx: x(point.x).toFixed(1), cy: y(point.y).toFixed(1), r: 3.5, vars: { fill: `var(${point.color ?? "--accent"})` } });
      if (point.title) dot.append(s("title", { text: point.title }));
      if (point.onclick) dot.addEventListener("click", point.onclick);
      svg.append(dot);
    }
    axisNames(svg, xo, yo, box);
  });
}

function axisNames(svg, xo, yo, box) {
  if (xo.label) svg.append(s("text", { class: "tick", x: box.right, y: box.bottom - 6, "text-anchor": "end", text: `${xo.label} →` }));
  if (yo.label) svg.append(s("text", { class: "tick", x: box.left + 4, y: box.top + 8, text: `↑ ${yo.label}` }));
}

/**
 * Horizontal bars as HTML, which wraps and scales with the text. rows: [{ label, value, text, color, title }];
 * `max`: the length of a full bar. Returns the element; no redraw is needed.
 */
export function bars(rows, { max = Math.max(1e-12, ...rows.map((row) => row.value)), label } = {}) {
  return h("ul", { class: "bars", "aria-label": label },
    rows.map((row) => h("li", { title: row.title },
      h("span", { class: "bar-label", text: row.label }),
      h("span", { class: "bar-track", "aria-hidden": "true" },
        h("span", { class: "bar-fill", vars: { "--share": Math.max(0, Math.min(1, row.value / max)), "--c": `var(${row.color ?? "--accent"})` } })),
      h("span", { class: "bar-text", text: row.text ?? identity(row.value) }))));
}

/** Vertical columns. columns: [{ label, value, title, color, parts: [{ value, color }] }]; y: { format, max }. */
export function columns(container, options) {
  return chart(container, options, (svg, { columns: list = [], y: yo = {}, ...rest }, width, height) => {
    const box = inner(width, height);
    if (!list.length) { empty(svg, width, height, rest.empty); return; }
    const y = scale(0, yo.max ?? (Math.max(...list.map((c) => c.value)) * 1.05 || 1), box.bottom, box.top, { count: 3 });
    const step = (box.right - box.left) / list.length;
    const wide = Math.min(44, step * 0.68);
    const x = Object.assign(() => 0, { ticks: [] });
    axes(svg, x, y, box, { y: yo });
    const every = Math.ceil(list.length / Math.max(1, Math.floor((box.right - box.left) / 34)));
    list.forEach((column, i) => {
      const left = box.left + step * i + (step - wide) / 2;
      let base = 0;
      for (const part of column.parts ?? [{ value: column.value, color: column.color }]) {
        if (part.value > 0) {
          const rect = s("rect", { class: "column", x: left.toFixed(1), width: wide.toFixed(1), y: y(base + part.value).toFixed(1), height: Math.max(1, y(base) - y(base + part.value)).toFixed(1), rx: 2, vars: { fill: `var(${part.color ?? "--accent"})` } });
          if (column.title) rect.append(s("title", { text: column.title }));
          svg.append(rect);
        }
        base += part.value;
      }
      if (i % every === 0) svg.append(s("text", { class: "tick", x: left + wide / 2, y: box.bottom + 17, "text-anchor": "middle", text: column.label }));
    });
  });
}

/**
 * Intervals against a margin. rows: [{ label, low, estimate, high, margin, color, title }]; `zero`: no difference.
 * One row is one line of the picture; `format` writes the axis.
 */
export function intervals(container, options) {
  const rowHeight = 26;
  const height = (rows) => MARGIN.top + rows.length * rowHeight + MARGIN.bottom;
  const sized = (o) => ({ ...o, ...(o.rows ? { height: height(o.rows) } : {}) });
  const made = chart(container, sized(options), (svg, { rows = [], zero = 0, format = identity, names = true, ...rest }, width, total) => {
    if (!rows.length) { empty(svg, width, total, rest.empty); return; }
    const left = names ? Math.min(200, Math.max(90, width * 0.28)) : 12;
    const box = inner(width, total, left);
    const [low, high] = extent([zero, ...rows.flatMap((row) => [row.low, row.high, row.estimate, row.margin])].filter((v) => v !== null && v !== undefined && Number.isFinite(v)));
    const pad = (high - low) * 0.06 || 1;
    const x = scale(low - pad, high + pad, box.left, box.right, { count: Math.max(2, Math.floor((box.right - box.left) / 90)) });
    axes(svg, x, Object.assign(() => 0, { ticks: [] }), box, { x: { format } });
    svg.append(s("line", { class: "grid strong", x1: x(zero), x2: x(zero), y1: box.top, y2: box.bottom }));
    rows.forEach((row, i) => {
      const at = box.top + (i + 0.5) * rowHeight;
      const color = `var(${row.color ?? "--accent"})`;
      const clamp = (value, infinite) => (Number.isFinite(value) ? x(value) : infinite);
      const from = clamp(row.low, box.left), to = clamp(row.high, box.right);
      const group = s("g", {}, row.title && s("title", { text: row.title }));
      if (names) group.append(s("text", { class: "name", x: box.left - 10, y: at + 4, "text-anchor": "end", text: row.label }));
      group.append(s("rect", { class: "interval", x: from, width: Math.max(1, to - from), y: at - 4, height: 8, rx: 4, vars: { fill: color } }));
      if (Number.isFinite(row.margin)) group.append(s("line", { class: "margin", x1: x(row.margin), x2: x(row.margin), y1: at - 9, y2: at + 9 }));
      if (Number.isFinite(row.estimate)) group.append(s("circle", { class: "estimate", cx: x(row.estimate), cy: at, r: 4, vars: { fill: color } }));
      svg.append(group);
    });
  });
  return { ...made, update: (next) => made.update(sized(next)) };
}
