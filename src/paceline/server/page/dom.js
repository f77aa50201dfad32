// Elements from tags, properties and children. Text is always textContent: nothing is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return add(element, ...children);
}

const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

/** Appends children; those that are null, undefined or false are left out. */
export const add = (element, ...children) => {
  element.append(...present(children));
  return element;
};

/** h("button", { class: "primary", onclick: run, "aria-label": "Run" }, "Run"). `vars` sets CSS properties. */
export const h = (tag, properties, ...children) => build(document.createElement(tag), properties, children);

/** The same for SVG. */
export const s = (tag, properties, ...children) => build(document.createElementNS(SVG, tag), properties, children);

/** Text whose parts between backticks are code. */
export const prose = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", { text: part }) : part));

/** Replaces all children. */
export const fill = (element, ...children) => {
  element.replaceChildren(...present(children));
  return element;
};

/** Runs `draw` at most once for each frame, however often it is called. */
export function perFrame(draw) {
  let asked = 0;
  const call = () => { asked ||= requestAnimationFrame(() => { asked = 0; draw(); }); };
  call.cancel = () => { cancelAnimationFrame(asked); asked = 0; };
  return call;
}

/** A titled surface: `panel("Acceptance", element, { note })`. */
export const panel = (title, content, { note, actions, className = "" } = {}) =>
  h("section", { class: `panel ${className}` },
    h("header", { class: "panel-head" }, h("h2", { text: title }), note && h("span", { class: "note", text: note }), actions),
    content);

/** A figure with its label: `tile("TTFT", "38 ms", "median of the last hour")`. */
export const tile = (label, value, note = "") =>
  h("div", { class: "tile" }, h("dt", { text: label }), h("dd", { text: value }), note && h("dd", { class: "note", text: note }));

/** Content that may be wider than its place: it scrolls, by the keyboard too. */
export const scroller = (label, content) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, content);
