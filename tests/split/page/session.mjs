// The session without a browser: a socket that a script answers, a clock that a script turns.

import assert from "node:assert/strict";

const folder = process.argv[2];
const { Session } = await import(`${folder}/session.js`);
const { extendHash } = await import(`${folder}/wire.js`);

const SECRET = new Uint8Array(32).fill(7);
const PROMPT_HASH = extendHash(0xcbf29ce484222325n, [1, 2, 3]);

class Clock {
  time = 0;
  timers = new Map();
  now = () => this.time;
  later = (call, ms) => { const id = Symbol("timer"); this.timers.set(id, { at: this.time + ms, call }); return id; };
  forget = (id) => this.timers.delete(id);
  /** Runs what falls due, in order. */
  turn(ms) {
    const end = this.time + ms;
    for (;;) {
      const [id, next] = [...this.timers].sort((a, b) => a[1].at - b[1].at)[0] ?? [];
      if (!next || next.at > end) break;
      this.timers.delete(id);
      this.time = next.at;
      next.call();
    }
    this.time = end;
  }
}

const u = (value, size) => Array.from({ length: size }, (_, i) => Number((BigInt(value) >> BigInt(8 * i)) & 0xffn));
const text = (value, size) => { const data = [...new TextEncoder().encode(value)]; return [...u(data.length, size), ...data]; };
const ids = (tokens, size) => [...u(tokens.length, size), ...tokens.flatMap((token) => u(token, 3))];
const padded = (data, block) => [...data, ...Array((block - (data.length % block)) % block).fill(0)];
const server = {
  welcome: ({ drafts = 1, credits = 2, maxDraft = 64 } = {}) => [0x81, 1, drafts, ...Array(32).fill(0), ...u(100, 4), maxDraft, credits, ...text("toy", 1)],
  opened: (tail = []) => [0x82, ...SECRET, ...text("r1", 1), ...u(3, 4), ...u(PROMPT_HASH, 8), ...ids(tail, 2)],
  commit: (before, tokens, { draft = 0, accepted = 0, maxDraft = 4, passes = 1 } = {}) =>
    padded([0x83, ...u(before.length, 3), ...u(extendHash(PROMPT_HASH, [...before, ...tokens]), 8), ...u(draft, 4), ...u(passes, 3), accepted, maxDraft, ...ids(tokens, 1)], 52),
  end: (tokens, finish = 1) => [0x84, ...u(tokens.length, 4), ...u(extendHash(PROMPT_HASH, tokens), 8), finish, ...u(10, 4), ...text('{"passes": 2}', 2)],
  error: (message, { status = 400, retryMs = 0, closes = 1, name = "code" } = {}) => [0x85, ...u(status, 2), closes, ...u(retryMs, 4), ...text(name, 1), ...text(message, 2)],
  pong: (number) => [0x86, ...u(number, 4)],
};

class Socket {
  readyState = 0;
  sent = [];
  open() { this.readyState = 1; this.onopen(); }
  send(data) { this.sent.push(data); }
  say(data) { this.onmessage?.({ data: Uint8Array.from(data).buffer }); }
  close() { this.readyState = 3; }
  drop() { this.readyState = 3; this.onclose?.(); }
  of(type) { return this.sent.filter((data) => data[0] === type); }
}

const settle = async () => { for (let i = 0; i < 20; i += 1) await null; };
const draftOf = (data) => {
  const view = new DataView(data.buffer);
  const tokens = Array.from({ length: data[17] }, (_, i) => data[18 + 3 * i] | (data[19 + 3 * i] << 8) | (data[20 + 3 * i] << 16));
  return { number: view.getUint32(1, true), base: view.getUint32(5, true), hash: view.getBigUint64(9, true), tokens };
};
/** Drafts 10, 11, 12, ... after the text, by its length. */
const counting = { name: "counting", draft: async (tokens, after, count) => Array.from({ length: count }, (_, i) => 10 + tokens.length + after.length + i) };

async function begin(options = {}) {
  const clock = new Clock(), sockets = [];
  const connect = () => { sockets.push(new Socket()); return sockets.at(-1); };
  const session = new Session({ connect, clock, fingerprint: new Uint8Array(32), drafter: counting, ...options });
  session.start({ messages: [] }, options.how);
  await settle();
  sockets[0].open();
  sockets[0].say(server.welcome(options.welcome));
  sockets[0].say(server.opened());
  await settle();
  return { session, clock, sockets, socket: sockets[0] };
}

const tests = {
  async "drafts begin once the prompt is known, within the server's bounds"() {
    const { session, socket } = await begin();
    assert.deepEqual(socket.sent.map((data) => data[0]), [0x01, 0x02, 0x06, 0x03]);
    assert.deepEqual(draftOf(socket.of(3)[0]), { number: 1, base: 0, hash: PROMPT_HASH, tokens: [10, 11, 12, 13, 14, 15, 16, 17, 18, 19] });
    assert.equal(session.ahead.length, 10);
  },

  async "tokens that agree stay provisional, and a longer draft follows when few are left"() {
    const { session, socket } = await begin();
    socket.say(server.commit([], [10, 11], { draft: 1, accepted: 2 }));
    await settle();
    assert.deepEqual(session.tokens, [10, 11]);
    assert.deepEqual(session.drafted, [true, true]);
    assert.equal(session.ahead.length, 8); // enough: the server has them
    assert.equal(socket.of(3).length, 1);
    socket.say(server.commit([10, 11], [12, 13, 14, 15, 16], { draft: 1, accepted: 5 }));
    await settle();
    assert.deepEqual(session.ahead.slice(0, 5), [17, 18, 19, 20, 21]);
    assert.deepEqual(draftOf(socket.of(3)[1]), { number: 2, base: 7, hash: extendHash(PROMPT_HASH, session.tokens), tokens: session.ahead });
    assert.equal(session.ahead.length, 20);
  },

  async "a correction drops what follows, and is drafted from at once"() {
    const { session, socket } = await begin();
    socket.say(server.commit([], [10, 99], { draft: 1, accepted: 1 }));
    assert.deepEqual(session.ahead, []);
    await settle();
    assert.deepEqual(session.tokens, [10, 99]);
    assert.deepEqual(session.drafted, [true, false]);
    assert.deepEqual(session.ahead, [12, 13, 14, 15, 16, 17, 18, 19, 20, 21]);
    assert.equal(draftOf(socket.of(3)[1]).hash, extendHash(PROMPT_HASH, [10, 99]));
  },

  async "no more drafts are on their way than there are credits"() {
    const { session, socket } = await begin({ welcome: { credits: 1 } });
    socket.say(server.commit([], [99], { draft: 0 })); // the draft was not read yet
    await settle();
    assert.equal(socket.of(3).length, 1);
    assert.equal(session.ahead[0], 11); // shown all the same
    socket.say(server.commit([99], [11], { draft: 1, accepted: 0 }));
    await settle();
    assert.equal(draftOf(socket.of(3)[1]).tokens[0], 12);
  },

  async "a model drafts in small steps, as far as the server gets while a draft travels"() {
    const { session, socket, clock } = await begin({ drafter: { ...counting, step: 4 } });
    assert.equal(socket.of(3).length, 2); // of 4 and 8 tokens; no credit for the third
    assert.equal(session.ahead.length, 10);
    clock.turn(30);
    socket.say(server.pong(1));
    socket.say(server.commit([], [10], { draft: 2, accepted: 1 }));
    clock.turn(10);
    socket.say(server.commit([10], [11], { draft: 2, accepted: 1, maxDraft: 6 }));
    await settle();
    assert.equal(session.figures.msPerToken, 10);
    assert.equal(session.ahead.length, 9); // 6 wanted and 3 on the way
  },

  async "a slow model sends each token"() {
    let clock = null;
    const slow = { step: 4, draft: async (tokens, after, count) => { clock.turn(100 * count); return counting.draft(tokens, after, count); } };
    clock = new Clock();
    const sockets = [], session = new Session({ connect: () => { sockets.push(new Socket()); return sockets.at(-1); }, clock, fingerprint: new Uint8Array(32), drafter: slow });
    session.start({ messages: [] });
    await settle();
    sockets[0].open();
    sockets[0].say(server.welcome({ credits: 9 }));
    sockets[0].say(server.opened());
    await settle();
    const lengths = sockets[0].of(3).map((data) => draftOf(data).tokens.length);
    assert.deepEqual(lengths, [4, 5, 6, 7, 8, 9, 10]);
  },

  async "a server that waits is told once that there is no draft"() {
    const empty = { draft: async () => [] };
    const { socket } = await begin({ drafter: empty, how: { mode: "patient", waitMs: 100 } });
    assert.deepEqual(draftOf(socket.of(3)[0]), { number: 1, base: 0, hash: PROMPT_HASH, tokens: [] });
    socket.say(server.commit([], [5], { draft: 1 }));
    await settle();
    assert.deepEqual(socket.of(3).map((data) => draftOf(data).base), [0, 1]);
    const other = await begin({ drafter: empty });
    assert.equal(other.socket.of(3).length, 0);
  },

  async "a server that waits is sent what is left of a draft, if that does not fill a pass"() {
    let left = 6;
    const ending = { draft: async (tokens, after, count) => { const found = (await counting.draft(tokens, after, count)).slice(0, left); left = 0; return found; } };
    const { socket } = await begin({ drafter: ending, how: { mode: "patient", waitMs: 100 } });
    socket.say(server.commit([], [10], { draft: 1, accepted: 1 }));
    await settle();
    assert.equal(socket.of(3).length, 1); // five are left, and a pass takes four
    socket.say(server.commit([10], [11], { draft: 1, accepted: 1 }));
    await settle();
    assert.deepEqual(draftOf(socket.of(3)[1]).tokens, [12, 13, 14, 15]);
  },

  async "a server that waits knows of a drafter that reads, and of one that stopped"() {
    let release;
    const model = { step: 4, draft: () => new Promise((resolve, reject) => { release = { resolve, reject }; }) };
    const how = { mode: "patient", waitMs: 100 };
    const { session, socket } = await begin({ drafter: model, how });
    assert.deepEqual(socket.sent.map((data) => data[0]), [0x01, 0x02, 0x06, 0x07]);
    socket.say(server.commit([], [5]));
    await settle();
    assert.equal(socket.of(3).length, 0); // it is at work: no word that nothing will come
    release.reject(new Error("out of memory"));
    await settle();
    assert.deepEqual(draftOf(socket.of(3)[0]), { number: 1, base: 1, hash: extendHash(PROMPT_HASH, [5]), tokens: [] });
    assert.match(session.error, /out of memory/);
    const none = await begin({ drafter: null, how });
    assert.equal(none.socket.of(2)[0][1], 1); // opportunistic: nobody is to wait in vain
    assert.equal(none.socket.of(7).length, 0);
  },

  async "after a restart of the server the answer is opened again, and its beginning compared"() {
    const { session, sockets, clock } = await begin();
    sockets[0].say(server.commit([], [10, 11, 99], { draft: 1, accepted: 2 }));
    sockets[0].drop();
    clock.turn(250);
    await settle();
    sockets[1].open();
    sockets[1].say(server.welcome());
    sockets[1].say(server.error("unknown", { status: 404, name: "unknown_stream", closes: 0 }));
    assert.deepEqual([...sockets[1].of(2)[0].slice(6, 17)], [3, 0, 10, 0, 0, 11, 0, 0, 99, 0, 0]); // the prediction
    sockets[1].say(server.opened());
    sockets[1].say(server.commit([], [10, 11], { accepted: 2 }));
    sockets[1].say(server.commit([10, 11], [99, 5], { accepted: 1 }));
    sockets[1].say(server.end([10, 11, 99, 5]));
    assert.deepEqual([session.status, session.tokens], ["done", [10, 11, 99, 5]]);
    assert.deepEqual(session.drafted, [true, true, false, false]);
  },

  async "a cut while the beginning comes again is resumed from there"() {
    for (const same of [true, false]) {
      const { session, sockets, clock } = await begin();
      sockets[0].say(server.commit([], [10, 11, 99]));
      sockets[0].drop();
      clock.turn(250);
      await settle();
      sockets[1].open();
      sockets[1].say(server.welcome());
      sockets[1].say(server.error("unknown", { status: 404, name: "unknown_stream", closes: 0 }));
      sockets[1].say(server.opened());
      sockets[1].say(server.commit([], [10]));
      sockets[1].drop();
      clock.turn(250);
      await settle();
      sockets[2].open();
      sockets[2].say(server.welcome());
      const view = new DataView(sockets[2].of(4)[0].buffer);
      assert.deepEqual([view.getUint32(33, true), view.getBigUint64(37, true)], [1, extendHash(PROMPT_HASH, [10])]);
      sockets[2].say(server.opened());
      sockets[2].say(server.commit([10], same ? [11, 99, 5] : [11, 98]));
      if (same) sockets[2].say(server.end([10, 11, 99, 5]));
      assert.deepEqual([session.status, session.tokens], same ? ["done", [10, 11, 99, 5]] : ["failed", [10, 11, 99]]);
    }
  },

  async "nothing is drafted where it does not pay, or the vocabularies differ"() {
    const { socket } = await begin();
    const before = [99];
    socket.say(server.commit([], before, { draft: 1, maxDraft: 0 }));
    await settle();
    assert.equal(socket.of(3).length, 1);
    for (let i = 0; i < 15; i += 1) socket.say(server.commit(before.slice(), [(before.push(99), 99)], { draft: 1, maxDraft: 0 }));
    await settle();
    assert.equal(socket.of(3).length, 2); // a probe, now and then
    const other = await begin({ welcome: { drafts: 0 } });
    assert.equal(other.socket.of(3).length, 0);
    other.socket.say(server.commit([], [5]));
    other.socket.say(server.end([5]));
    assert.equal(other.session.status, "done");
  },

  async "a cut is resumed with nothing lost and nothing repeated"() {
    const { session, sockets, clock } = await begin();
    sockets[0].say(server.commit([], [10, 11], { draft: 1, accepted: 2 }));
    sockets[0].drop();
    await settle();
    assert.equal(session.status, "offline");
    assert.equal(session.ahead.length, 64); // goes on for the eye, bounded
    clock.turn(250);
    await settle();
    assert.equal(sockets.length, 2);
    sockets[1].open();
    sockets[1].say(server.welcome());
    const resume = sockets[1].of(4)[0];
    assert.deepEqual([...resume.slice(1, 33)], [...SECRET]);
    assert.equal(new DataView(resume.buffer).getUint32(33, true), 2);
    assert.equal(new DataView(resume.buffer).getBigUint64(37, true), extendHash(PROMPT_HASH, [10, 11]));
    assert.equal(sockets[1].of(2).length, 0);
    sockets[1].say(server.opened());
    sockets[1].say(server.commit([10, 11], [12, 7], { passes: 2, accepted: 1 }));
    sockets[1].say(server.end([10, 11, 12, 7]));
    assert.deepEqual([session.tokens, session.status, session.finish], [[10, 11, 12, 7], "done", "length"]);
    assert.equal(session.figures.reconnects, 1);
    assert.deepEqual(session.ahead, []);
  },

  async "a commit with a gap or another hash is not believed"() {
    for (const wrong of [server.commit([10, 11], [12]), server.commit([9], []).map((byte, i) => (i === 1 ? 0 : byte))]) {
      const { session, sockets, clock } = await begin();
      sockets[0].say(wrong);
      assert.equal(session.status, "offline");
      assert.deepEqual(session.tokens, []);
      clock.turn(250);
      await settle();
      assert.equal(sockets.length, 2);
    }
  },

  async "waits between connections grow, and a network that comes back ends them"() {
    const { session, sockets, clock } = await begin();
    const waits = [250, 500, 1000, 2000, 5000, 5000];
    for (const wait of waits) {
      sockets.at(-1).drop();
      const before = sockets.length;
      clock.turn(wait - 1);
      await settle();
      assert.equal(sockets.length, before);
      clock.turn(1);
      await settle();
      assert.equal(sockets.length, before + 1);
    }
    sockets.at(-1).drop();
    session.online();
    await settle();
    assert.equal(sockets.length, waits.length + 2);
  },

  async "an error is a sentence, and a busy server is asked again"() {
    const { session, socket } = await begin();
    socket.say(server.error("the prompt is too long"));
    assert.deepEqual([session.status, session.error], ["failed", "the prompt is too long"]);
    const busy = await begin();
    busy.socket.say(server.error("busy", { status: 429, retryMs: 700 }));
    busy.clock.turn(700);
    await settle();
    assert.equal(busy.sockets.length, 2);
  },

  async "bytes that are no message end the answer"() {
    const { session, socket } = await begin();
    socket.say([0x99, 1]);
    assert.equal(session.status, "failed");
    assert.equal(socket.readyState, 3);
  },

  async "a drafter that fails leaves the answer alone"() {
    const broken = { draft: async () => { throw new Error("out of memory"); } };
    const { session, socket } = await begin({ drafter: broken });
    assert.match(session.error, /out of memory/);
    socket.say(server.commit([], [5]));
    socket.say(server.end([5]));
    assert.deepEqual([session.status, session.tokens], ["done", [5]]);
  },

  async "a draft that comes after a correction is dropped"() {
    let release;
    const slow = { step: 2, draft: () => new Promise((resolve) => { release = resolve; }) };
    const { session, socket } = await begin({ drafter: slow });
    const late = release;
    socket.say(server.commit([], [99]));
    late([10, 11]);
    await settle();
    assert.deepEqual(session.ahead, []);
    release([50, 51]);
    await settle();
    assert.deepEqual(session.ahead, [50, 51]);
    assert.deepEqual(draftOf(socket.of(3)[0]), { number: 1, base: 1, hash: extendHash(PROMPT_HASH, [99]), tokens: [50, 51] });
  },

  async "the round trip is measured by pings"() {
    const { session, socket, clock } = await begin();
    clock.turn(30);
    socket.say(server.pong(1));
    assert.equal(session.rttMs, 30);
    clock.turn(1000);
    assert.equal(socket.of(6).length, 2);
  },

  async "stopping is asked of the server, which has the last word"() {
    const { session, socket } = await begin();
    socket.say(server.commit([], [10], { draft: 1, accepted: 1 }));
    session.cancel();
    assert.equal(socket.of(5).length, 1);
    socket.say(server.end([10], 3));
    assert.deepEqual([session.status, session.finish], ["done", "cancelled"]);
    const early = new Session({ connect: () => new Socket(), clock: new Clock() });
    early.start({});
    early.cancel();
    assert.equal(early.status, "done");
  },
};

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  try {
    await test();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${name}\n${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
