// One answer as it is written: a span for each token, in the colour of the drafter that proposed it. Rounds come as
// `stream_options.include_rounds` sends them; whatever arrives between two frames is drawn in one go.

import { h, perFrame } from "./dom.js";
import { number, seconds, share } from "./format.js";

const KNOWN = new Set(["target", "grammar", "suffix", "ngram", "recycle", "prediction", "model", "self", "quantized", "medusa", "eagle", "block", "edge"]);
const BLOCK = 160; // tokens after which a line break begins a new block, which is laid out only while it is in sight
const MAX_BLOCK = 1200; // tokens of a block without any line break

export const sourceClass = (source) => `s-${KNOWN.has(source) ? source : "other"}`;

/** The drafters that occur, with their share of the tokens. */
export function legend(tokens) {
  const counts = new Map();
  for (const { source } of tokens) counts.set(source, (counts.get(source) ?? 0) + 1);
  const sorted = [...counts].sort((a, b) => b[1] - a[1]);
  return h("ul", { class: "legend", "aria-label": "Who proposed the tokens" },
    sorted.map(([source, count]) => h("li", {}, h("span", { class: `swatch ${sourceClass(source)}`, text: source }), h("span", { class: "note", text: share(count / tokens.length) }))));
}

export class Answer {
  /** label: for screen readers. onDraw: called after each frame that drew something. */
  constructor({ label = "Answer", announce = () => {}, onDraw = () => {} } = {}) {
    this.tokens = []; // { id, text, source, probability, logprob, round, position }
    this.rounds = []; // as sent, with `number`
    this.ghosts = false;
    this._spans = []; // of the tokens
    this._waiting = []; // rounds that are not drawn yet
    this._logprobs = 0; // tokens that have one
    this._announce = announce;
    this._onDraw = onDraw;
    this._current = -1; // the token under the pointer or the cursor
    this._tip = h("div", { class: "tip", role: "tooltip", hidden: true });
    this._text = h("div", {
      class: "tokens", tabindex: 0, role: "group", "aria-label": `${label}. Arrow keys go through its tokens.`,
      onpointerover: (event) => this._point(event.target),
      onpointerleave: () => this._show(-1),
      onkeydown: (event) => this._key(event),
      onblur: () => this._show(-1),
    });
    this.element = h("div", { class: "answer" }, this._text, this._tip);
    this._frame = perFrame(() => this._draw());
    this._newBlock();
  }

  add(round) {
    this._waiting.push(round);
    this._frame();
  }

  /** The model's own log-probabilities, of tokens in their order. */
  addLogprobs(list) {
    for (const { logprob } of list) {
      if (this.tokens[this._logprobs]) this.tokens[this._logprobs].logprob = logprob;
      this._logprobs += 1;
    }
  }

  /** Draws all that has come. */
  finish() {
    this._frame.cancel();
    this._draw();
  }

  get ids() { return this.tokens.map((token) => token.id); }
  get last() { return this.rounds.at(-1) ?? null; }

  setGhosts(on) {
    if (this.ghosts === on) return;
    this.ghosts = on;
    if (!on) { for (const ghost of this._text.querySelectorAll("del")) ghost.remove(); return; }
    for (const round of this.rounds) {
      if (round.rejected.length) this._spans[round.first + round.tokens.length - 1]?.before(...ghostsOf(round));
    }
  }

  /** Marks a token, such as the first that differs from another answer. */
  mark(index, className) { this._spans[index]?.classList.add(className); }

  _newBlock() {
    this._block = h("div", { class: "block" });
    this._inBlock = 0;
    this._text.append(this._block);
  }

  _draw() {
    const waiting = this._waiting;
    if (!waiting.length) return;
    this._waiting = [];
    let fragment = document.createDocumentFragment();
    for (const round of waiting) {
      round.number = this.rounds.length;
      round.first = this.tokens.length;
      this.rounds.push(round);
      round.tokens.forEach((token, i) => {
        const span = document.createElement("span");
        span.className = `t ${sourceClass(token.source)}`;
        span.textContent = token.text;
        span.index = this.tokens.length;
        this._spans.push(span);
        this.tokens.push({ ...token, round: round.number, position: round.start + i });
        if (this.ghosts && i === round.tokens.length - 1) fragment.append(...ghostsOf(round));
        fragment.append(span);
        this._inBlock += 1;
        const atBreak = this._inBlock >= BLOCK && token.text.includes("\n");
        if (atBreak || (this._inBlock >= MAX_BLOCK && /^\s/.test(token.text))) {
          this._block.append(fragment);
          fragment = document.createDocumentFragment();
          this._newBlock();
        }
      });
    }
    this._block.append(fragment);
    this._onDraw();
  }

  _point(target) {
    const span = target.closest?.(".t");
    if (span) this._show(span.index);
  }

  _key(event) {
    const last = this.tokens.length - 1;
    const moves = { ArrowRight: Math.min(last, this._current + 1), ArrowLeft: Math.max(0, this._current - 1), Home: 0, End: last, Escape: -1 };
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    this._show(moves[event.key], true);
  }

  _show(index, byKey = false) {
    this._spans[this._current]?.classList.remove("current");
    this._current = index;
    const span = this._spans[index];
    this._tip.hidden = !span;
    if (!span) return;
    span.classList.add("current");
    this._tip.replaceChildren(...this._about(index));
    if (byKey) {
      span.scrollIntoView({ block: "nearest" });
      this._announce(`${JSON.stringify(this.tokens[index].text)}, ${this._tip.innerText.replaceAll("\n", ", ")}`);
    }
    const box = this.element.getBoundingClientRect(), at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.max(0, Math.min(at.left - box.left, box.width - this._tip.offsetWidth));
    this._tip.style.setProperty("left", `${left}px`);
    this._tip.style.setProperty("top", `${at.bottom - box.top + 6}px`);
  }

  _about(index) {
    const token = this.tokens[index], round = this.rounds[token.round];
    const accepted = round.tokens.filter(({ source }) => source !== "target").length;
    const rejected = round.rejected.filter(({ position }) => position === token.position);
    const own = token.source === "target" ? (rejected.length ? "the model, against the draft" : "the model itself") : null;
    const facts = [
      ["position", number(token.position)],
      ["proposed by", h("span", { class: `swatch ${sourceClass(token.source)}`, text: own ?? token.source })],
      token.probability !== null && token.probability !== undefined && ["drafter's probability", share(token.probability, 1)],
      token.logprob !== undefined && ["model's probability", share(Math.exp(token.logprob), 1)],
      ["round", `${number(token.round)}: ${accepted} of ${round.drafted} drafted accepted`],
      ["its pass", `${seconds(round.target_us / 1e6)}${round.batch > 1 ? `, shared by ${round.batch}` : ""}; drafting ${seconds(round.draft_us / 1e6)}`],
      rejected.length > 0 && ["rejected here", rejected.map((guess) => h("del", { class: `g ${sourceClass(guess.source)}`, text: visible(guess.text) }))],
    ].filter(Boolean);
    return [h("dl", {}, facts.map(([name, value]) => [h("dt", { text: name }), h("dd", {}, value)]))];
  }
}

const visible = (text) => text.replaceAll("\n", "⏎") || "␀";

const ghostsOf = (round) => round.rejected.map((guess) =>
  h("del", { class: `g ${sourceClass(guess.source)}`, title: `rejected: ${guess.source}`, text: visible(guess.text) }));

/** Where two lists first differ; -1: nowhere. */
export function firstDifference(a, b) {
  const n = Math.max(a.length, b.length);
  for (let i = 0; i < n; i += 1) if (a[i] !== b[i]) return i;
  return -1;
}
