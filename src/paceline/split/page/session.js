// An answer over one WebSocket: drafts go up, commits come down. Knows nothing of the page, and is tested without one.
//
// A commit is the only source of truth. Tokens beyond it are provisional: the drafter's. A cut connection is resumed from the last
// commit, with nothing lost and nothing repeated; meanwhile the drafter may go on, for display only.

import { MAX_IDS, WireError, decode, encode, extendHash } from "./wire.js";

const PING_MS = 1000;
const RETRY_MS = [250, 500, 1000, 2000, 5000]; // waits before a new connection; the last one for all further ones
const MAX_OFFLINE = 64; // provisional tokens while there is no connection
const FIRST_DRAFT = 10; // tokens of a drafter that costs nothing: one block; drafts that come true are followed by longer ones
const PROBE_TOKENS = 16; // committed between two drafts while the server wants none
const STEP_MS = 150; // that drafted tokens of a model may wait for further ones
const SMOOTHING = 0.2; // of times that are averaged over rounds
const CLIENT = "paceline-page";

/** Times and timers of the browser; tests have their own. */
const BROWSER = { now: () => performance.now(), later: (call, ms) => setTimeout(call, ms), forget: (timer) => clearTimeout(timer) };

export class Session {
  status = "idle"; // connecting, answering, offline, done, failed
  error = null; // a sentence
  tokens = []; // committed
  drafted = []; // for each of them: did the drafter propose it?
  ahead = []; // provisional tokens beyond them
  finish = null;
  characters = null; // of the text, where a stop string cut it
  report = null;
  model = "";
  rttMs = null;
  figures = { passes: 0, accepted: 0, sent: 0, drafts: 0, bytesUp: 0, bytesDown: 0, reconnects: 0, draftMs: null, msPerToken: null };

  #socket = null;
  #welcome = null;
  #request = null; // what OPEN says
  #opened = null; // what OPENED said: the secret of the answer, the last tokens of the prompt
  #prompt = null; // the hash after the prompt
  #hash = 0n; // after the committed tokens
  #streamed = 0; // of them, those that the server's stream has sent: fewer after a restart
  #sent = { number: 0, read: 0, end: 0 }; // last draft sent, last one read by the server, the position that drafts reach
  #wanted = 0; // tokens that the server wants in a draft
  #length = FIRST_DRAFT; // of the next draft
  #silent = 0; // tokens committed since the last draft
  #patient = false; // the server waits for drafts
  #answeredAt = -1; // the position that the last draft, or the word that there is none, was for
  #text = 0; // counts the times that provisional tokens went: a draft in the making may be of no use
  #drafting = false;
  #pings = new Map();
  #timers = { ping: null, retry: null };
  #attempt = 0;
  #begun = null; // when the first commit came

  /**
   * connect(): a new WebSocket. ticket(): a promise of one, "" where none is needed. fingerprint: of the vocabulary, or null.
   * drafter: has draft(tokens, after, count), a promise of tokens; null: none. onChange(): something to show has changed.
   */
  constructor({ connect, ticket = async () => "", fingerprint = null, drafter = null, onChange = () => {}, clock = BROWSER }) {
    Object.assign(this, { connect, ticket, fingerprint, drafter, onChange, clock });
  }

  /** body: as for /v1/chat/completions. */
  start(body, { mode = "opportunistic", waitMs = 0, promptTail = 1024 } = {}) {
    this.#patient = mode === "patient" && this.drafter !== null; // nobody is to wait for drafts that never come
    this.#request = { body, mode: mode === "patient" && !this.#patient ? "opportunistic" : mode, waitMs, promptTail };
    this.status = "connecting";
    this.#connect();
    this.onChange();
  }

  cancel() {
    if (this.#socket?.readyState === 1 && this.#opened && this.status === "answering") this.#send(encode.cancel());
    else this.#end("done", "cancelled");
  }

  /** Connects at once if the session waits to do so: the browser says that there is a network again. */
  online() {
    if (this.status !== "offline" || this.#timers.retry === null) return;
    this.clock.forget(this.#timers.retry);
    this.#connect();
  }

  close() {
    for (const name of Object.keys(this.#timers)) {
      if (this.#timers[name] !== null) this.clock.forget(this.#timers[name]);
      this.#timers[name] = null;
    }
    const socket = this.#socket;
    this.#socket = null;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = socket.onerror = null;
      socket.close();
    }
  }

  async #connect() {
    this.close();
    this.#welcome = null;
    this.#pings.clear();
    let ticket;
    try {
      ticket = await this.ticket();
    } catch (error) {
      if (error.status) this.#fail(error.message); // an answer of the server: asking again would not help
      else this.#lost();
      return;
    }
    if (this.status === "done" || this.status === "failed") return;
    let socket;
    try {
      socket = this.connect();
    } catch {
      this.#lost();
      return;
    }
    socket.binaryType = "arraybuffer";
    socket.onopen = () => this.#send(encode.hello({ fingerprint: this.fingerprint ?? undefined, ticket, client: CLIENT }));
    socket.onmessage = ({ data }) => this.#receive(data);
    socket.onclose = () => this.#lost();
    socket.onerror = () => {}; // a close follows
    this.#socket = socket;
  }

  #send(bytes) {
    if (this.#socket?.readyState !== 1) return;
    this.#socket.send(bytes);
    this.figures.bytesUp += bytes.length + (bytes.length < 126 ? 6 : 8);
  }

  #receive(data) {
    const length = data.byteLength ?? 0;
    this.figures.bytesDown += length + (length < 126 ? 2 : 4);
    let message;
    try {
      message = decode(data);
    } catch (error) {
      if (!(error instanceof WireError)) throw error;
      this.#fail(`The server sent something else than this page understands: ${error.message}.`);
      return;
    }
    this[`_${message.type}`](message);
    this.onChange();
  }

  #lost() {
    if (this.status === "done" || this.status === "failed") return;
    this.close();
    this.status = "offline";
    const wait = RETRY_MS[Math.min(this.#attempt, RETRY_MS.length - 1)];
    this.#attempt += 1;
    this.figures.reconnects += 1;
    this.#timers.retry = this.clock.later(() => { this.#timers.retry = null; this.#connect(); }, wait);
    this.#draftOn();
    this.onChange();
  }

  #fail(message) {
    this.error = message;
    this.#end("failed", null);
  }

  #end(status, finish) {
    Object.assign(this, { status, finish, ahead: [] });
    this.#text += 1;
    this.close();
    this.onChange();
  }

  _welcome(message) {
    this.#welcome = message;
    this.#wanted = FIRST_DRAFT;
    this.#answeredAt = -1;
    this.#sent = { number: 0, read: 0, end: 0 };
    this.model = message.model;
    const secret = this.#opened?.secret;
    const have = this.#streamed, hash = extendHash(this.#prompt ?? 0n, this.tokens.slice(0, have));
    if (secret) this.#send(encode.resume({ secret, have, hash }));
    else this.#open();
    this.#ping();
  }

  /** After a restart of the server, what is known of the answer is its draft. */
  #open() {
    this.#send(encode.open({ ...this.#request, prediction: this.tokens }));
  }

  _opened(message) {
    this.#attempt = 0;
    this.status = "answering";
    if (this.#prompt === null) this.#hash = this.#prompt = message.hash;
    if (message.hash !== this.#prompt) {
      this.#fail("The server has restarted with another model: the text cannot be continued.");
      return;
    }
    this.#opened = { secret: message.secret.slice(), tail: this.#opened?.tail ?? message.tail };
    if (this.#patient && this.#welcome.drafts) this.#send(encode.reading());
    this.#draftOn();
  }

  _commit(message) {
    // After a restart of the server the answer comes again from its beginning.
    const known = this.tokens.slice(message.start, message.start + message.tokens.length);
    const tokens = message.tokens.slice(known.length), hash = extendHash(this.#hash, tokens);
    const gap = message.start > this.tokens.length, end = message.start + message.tokens.length;
    if (known.some((token, i) => token !== message.tokens[i])) {
      this.#fail("The server's text differs from what it sent before: start again.");
      return;
    }
    if (gap || (end >= this.tokens.length && hash !== message.hash)) { // one that ends earlier has an earlier hash
      this.#lost(); // resume from the last commit
      return;
    }
    this.#hash = hash;
    this.#streamed = end;
    this.#sent.read = message.draft;
    this.#wanted = message.maxDraft;
    this.#silent += tokens.length;
    this.#pace(tokens.length);
    tokens.forEach((token, i) => { this.tokens.push(token); this.drafted.push(known.length + i < message.accepted); });
    this.figures.passes = message.passes;
    this.figures.accepted = this.drafted.filter(Boolean).length;
    if (tokens.length <= this.ahead.length && tokens.every((token, i) => token === this.ahead[i])) this.ahead = this.ahead.slice(tokens.length);
    else this.#forget();
    this.#draftOn();
  }

  /** The text went on in another way than was drafted. */
  #forget() {
    this.ahead = [];
    this.#text += 1;
    this.#length = FIRST_DRAFT;
    this.#sent.end = 0;
  }

  _end(message) {
    if (message.tokens !== this.tokens.length || message.hash !== this.#hash) {
      this.#lost();
      return;
    }
    Object.assign(this, { characters: message.characters, report: message.report });
    this.#end("done", message.finish);
  }

  _error(message) {
    if (message.name === "unknown_stream" && this.#opened?.secret) {
      this.#opened.secret = null;
      this.#streamed = 0;
      this.#open();
      return;
    }
    if (message.retryMs && this.#attempt < RETRY_MS.length) {
      this.#attempt += 1;
      this.close();
      this.status = "offline";
      this.#timers.retry = this.clock.later(() => { this.#timers.retry = null; this.#connect(); }, message.retryMs);
      return;
    }
    this.#fail(message.message);
  }

  _pong(message) {
    const sent = this.#pings.get(message.number);
    this.#pings.delete(message.number);
    if (sent !== undefined) this.rttMs = average(this.rttMs, this.clock.now() - sent);
  }

  #ping() {
    const number = (this.lastPing = ((this.lastPing ?? 0) + 1) % 2 ** 32);
    this.#pings.set(number, this.clock.now());
    if (this.#pings.size > 8) this.#pings.delete(this.#pings.keys().next().value);
    this.#send(encode.ping({ number }));
    this.#timers.ping = this.clock.later(() => this.#ping(), PING_MS);
  }

  #pace(added) {
    const now = this.clock.now(), count = this.tokens.length + added;
    this.#begun ??= { at: now, tokens: count };
    if (count > this.#begun.tokens) this.figures.msPerToken = (now - this.#begun.at) / (count - this.#begun.tokens);
  }

  /** How many provisional tokens there should be. */
  #goal() {
    if (!this.drafter || !this.#opened) return 0;
    if (this.status === "offline") return MAX_OFFLINE;
    if (this.status !== "answering" || !this.#welcome?.drafts || this.#request.mode === "one-shot") return 0;
    if (this.#wanted === 0 && this.#silent < PROBE_TOKENS) return 0;
    const most = Math.min(this.#welcome.maxDraft, MAX_IDS);
    if (!this.drafter.step) return this.ahead.length >= Math.max(1, this.#wanted) ? 0 : Math.min(most, this.#length);
    // A model: those wanted, and those that the server writes while a draft travels.
    const meanwhile = this.figures.msPerToken ? Math.ceil((this.rttMs ?? 0) / this.figures.msPerToken) : 0;
    return Math.min(most, (this.#wanted || this.drafter.step) + meanwhile);
  }

  /** Tokens that a model drafts before they are sent: a slow one sends each. */
  #step() {
    const { step } = this.drafter, each = this.figures.draftMs;
    return step && each ? Math.max(1, Math.min(step, Math.floor(STEP_MS / each))) : step;
  }

  async #draftOn() {
    if (this.#drafting) {
      this.#post(); // what found no credit before
      return;
    }
    this.#drafting = true;
    try {
      for (let room = this.#goal() - this.ahead.length; room > 0; room = this.#goal() - this.ahead.length) {
        const text = this.#text, begun = this.clock.now(), count = Math.min(room, this.#step() ?? room);
        const found = await this.drafter.draft([...this.#opened.tail, ...this.tokens], this.ahead, count);
        if (text !== this.#text) continue; // the text went on in another way
        if (found.length === 0) break;
        this.figures.draftMs = average(this.figures.draftMs, (this.clock.now() - begun) / found.length);
        this.ahead = [...this.ahead, ...found];
        this.figures.drafts += found.length;
        this.#length = Math.min(2 * this.#length, MAX_IDS);
        this.#post();
        this.onChange();
      }
    } catch (error) {
      this.drafter = null; // the answer goes on without drafts
      this.error = `The drafter stopped: ${error.message}`;
      this.onChange();
    } finally {
      this.#drafting = false;
    }
    this.#post();
  }

  /**
   * Sends the provisional tokens, if the server does not have them yet and may be sent a draft. A patient server waits at each position,
   * unless what it has fills a pass: it is told all that there is, or that there is nothing.
   */
  #post() {
    const here = this.tokens.length, end = here + this.ahead.length;
    const free = this.#sent.number - this.#sent.read < (this.#welcome?.credits ?? 0);
    if (this.status !== "answering" || !this.#welcome?.drafts || !free) return;
    const awaited = this.#patient && !this.#drafting && this.ahead.length <= this.#wanted && this.#wanted > 0 && this.#answeredAt !== here;
    if (!awaited && !(this.ahead.length && end > this.#sent.end)) return;
    this.#answeredAt = here;
    const tokens = this.ahead.slice(0, Math.min(this.#welcome.maxDraft, MAX_IDS));
    this.#sent.number += 1;
    this.#sent.end = end;
    this.#silent = 0;
    this.figures.sent += 1;
    this.#send(encode.draft({ number: this.#sent.number, base: here, hash: this.#hash, tokens }));
  }
}

const average = (old, value) => (old === null ? value : old + SMOOTHING * (value - old));
