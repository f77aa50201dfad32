// The messages of a split deployment as bytes, version 1: a mirror of split/wire.py. docs/split.md has the table.

export const MAX_IDS = 64; // of a draft or a commit
export const MODES = { "one-shot": 0, opportunistic: 1, patient: 2 };
export const FINISHES = ["stop", "length", "tool_calls", "cancelled"];
export const HASH_START = 0xcbf29ce484222325n;
const HASH_PRIME = 0x100000001b3n;
const MASK = 0xffffffffffffffffn;
const MAGIC = [0x50, 0x43, 0x4c, 0x53]; // PCLS
const FINGERPRINT_BYTES = 32;
const SECRET_BYTES = 32;
const DRAFT_BLOCK = 48;
const COMMIT_BLOCK = 52;

export class WireError extends Error {}

/** The running hash after more tokens: FNV-1a over tokens, modulo 2 ** 64. */
export function extendHash(value, tokens) {
  for (const token of tokens) value = ((value ^ BigInt(token)) * HASH_PRIME) & MASK;
  return value;
}

class Writer {
  bytes = [];

  u8(value) { return this.number(value, 1); }
  u16(value) { return this.number(value, 2); }
  u32(value) { return this.number(value, 4); }

  number(value, size) {
    if (!Number.isInteger(value) || value < 0 || value >= 2 ** (8 * size)) throw new WireError(`${value} does not fit ${8 * size} bits`);
    for (let i = 0; i < size; i += 1) this.bytes.push(Math.floor(value / 2 ** (8 * i)) % 256);
    return this;
  }

  u64(value) {
    for (let i = 0n; i < 64n; i += 8n) this.bytes.push(Number((value >> i) & 0xffn));
    return this;
  }

  raw(bytes, size = bytes.length) {
    if (bytes.length !== size) throw new WireError(`${bytes.length} bytes where ${size} are expected`);
    for (const byte of bytes) this.bytes.push(byte);
    return this;
  }

  text(value, size) {
    const bytes = new TextEncoder().encode(value);
    return this.number(bytes.length, size).raw(bytes);
  }

  ids(tokens, size, limit) {
    if (tokens.length > limit) throw new WireError(`${tokens.length} tokens, at most ${limit} fit`);
    this.number(tokens.length, size);
    for (const token of tokens) this.number(token, 3);
    return this;
  }

  end(block = 1) {
    while (this.bytes.length % block) this.bytes.push(0);
    return new Uint8Array(this.bytes);
  }
}

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  u8(field) { return this.number(1, field); }
  u16(field) { return this.number(2, field); }
  u32(field) { return this.number(4, field); }

  take(size, field) {
    if (this.at + size > this.bytes.length) throw new WireError(`the message ends within ${field}`);
    this.at += size;
    return this.bytes.subarray(this.at - size, this.at);
  }

  number(size, field) {
    return this.take(size, field).reduceRight((value, byte) => value * 256 + byte, 0);
  }

  u64(field) {
    return this.take(8, field).reduceRight((value, byte) => (value << 8n) | BigInt(byte), 0n);
  }

  text(size, field) {
    const bytes = this.take(this.number(size, field), field);
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    } catch {
      throw new WireError(`${field} is not UTF-8`);
    }
  }

  flag(field) {
    const value = this.u8(field);
    if (value > 1) throw new WireError(`${field} is ${value}: expected 0 or 1`);
    return value === 1;
  }

  ids(size, field, limit) {
    const count = this.number(size, field);
    if (count > limit) throw new WireError(`${field}: ${count} tokens, at most ${limit} are read`);
    return Array.from({ length: count }, () => this.number(3, field));
  }

  end(padding = 0) {
    const rest = this.bytes.subarray(this.at);
    if (rest.length > padding || rest.some((byte) => byte !== 0)) throw new WireError("bytes follow the end of the message");
  }
}

/** Messages of a client. Hashes are BigInt, fingerprints and secrets Uint8Array, tokens arrays of numbers. */
export const encode = {
  hello: ({ fingerprint = new Uint8Array(FINGERPRINT_BYTES), ticket = "", client = "" } = {}) =>
    new Writer().u8(0x01).raw(MAGIC).u8(1).u8(1).raw(fingerprint, FINGERPRINT_BYTES).text(ticket, 1).text(client, 1).end(),

  open: ({ body, mode = "opportunistic", waitMs = 0, promptTail = 0, prediction = [] }) =>
    new Writer().u8(0x02).u8(MODES[mode]).u16(waitMs).u16(promptTail).ids(prediction, 2, 65535).text(JSON.stringify(body), 4).end(),

  draft: ({ number, base, hash, tokens }) =>
    new Writer().u8(0x03).u32(number).u32(base).u64(hash).ids(tokens, 1, MAX_IDS).end(DRAFT_BLOCK),

  resume: ({ secret, have, hash }) => new Writer().u8(0x04).raw(secret, SECRET_BYTES).u32(have).u64(hash).end(),

  cancel: () => new Writer().u8(0x05).end(),

  reading: () => new Writer().u8(0x07).end(),

  ping: ({ number }) => new Writer().u8(0x06).u32(number).end(),
};

const READERS = {
  0x81: (r) => ({
    type: "welcome", version: r.u8("the version"), drafts: r.flag("the flag of drafts"), fingerprint: r.take(FINGERPRINT_BYTES, "the fingerprint"),
    vocabSize: r.u32("the vocabulary"), maxDraft: r.u8("the longest draft"), credits: r.u8("the credits"), model: r.text(1, "the model"),
  }),
  0x82: (r) => ({
    type: "opened", secret: r.take(SECRET_BYTES, "the secret"), request: r.text(1, "the request"), promptLen: r.u32("the prompt's length"),
    hash: r.u64("the hash"), tail: r.ids(2, "the tail", 65535),
  }),
  0x83: (r) => {
    const start = r.number(3, "the start"), hash = r.u64("the hash"), draft = r.u32("the draft's number"), passes = r.number(3, "the passes");
    const accepted = r.u8("the accepted tokens"), maxDraft = r.u8("the longest draft");
    return { type: "commit", start, hash, draft, passes, accepted, maxDraft, tokens: r.ids(1, "the tokens", MAX_IDS) };
  },
  0x84: (r) => {
    const tokens = r.u32("the tokens"), hash = r.u64("the hash"), finish = FINISHES[r.u8("the reason")], characters = r.u32("the characters");
    if (finish === undefined) throw new WireError(`the reason of the end is unknown: expected 0 to ${FINISHES.length - 1}`);
    return { type: "end", tokens, hash, finish, characters, report: JSON.parse(r.text(2, "the report")) };
  },
  0x85: (r) => {
    const status = r.u16("the status"), closes = r.flag("the flag of closing"), retryMs = r.u32("the delay");
    return { type: "error", status, closes, retryMs, name: r.text(1, "the name"), message: r.text(2, "the message") };
  },
  0x86: (r) => ({ type: "pong", number: r.u32("the number") }),
};

/** A message of a server. data: an ArrayBuffer or Uint8Array. Throws a WireError for any other bytes. */
export function decode(data) {
  const bytes = data instanceof Uint8Array ? data : new Uint8Array(data);
  const read = READERS[bytes[0]];
  if (read === undefined) throw new WireError("a server sends no such message");
  const reader = new Reader(bytes);
  reader.at = 1;
  const block = bytes[0] === 0x83 ? COMMIT_BLOCK : 1;
  if (bytes.length % block) throw new WireError(`${bytes.length} bytes are no whole blocks of ${block}`);
  const message = read(reader);
  reader.end(block - 1);
  return message;
}
