// The tokens of the target as bytes: from ids to text, and the fingerprint that says which ids a drafter means.

import { WireError } from "./wire.js";

const CONTROL = 0x8000; // flag of a length: the token is never part of a text

export class Vocabulary {
  /** data: the bytes of GET /v1/split/vocabulary. */
  constructor(data) {
    const bytes = new Uint8Array(data), view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    if (bytes.length < 4) throw new WireError("the vocabulary is cut off");
    this.size = view.getUint32(0, true);
    this.pieces = [];
    this.control = new Set();
    const plain = bytes.slice(4); // lengths without their flag, as the fingerprint has them
    let at = 4;
    for (let token = 0; token < this.size; token += 1) {
      if (at + 2 > bytes.length) throw new WireError("the vocabulary is cut off");
      const length = view.getUint16(at, true);
      if (length & CONTROL) this.control.add(token);
      plain[at + 1 - 4] &= 0x7f;
      at += 2;
      this.pieces.push(bytes.subarray(at, (at += length & ~CONTROL)));
    }
    if (at !== bytes.length) throw new WireError("the vocabulary has another length than it says");
    this.plain = plain;
  }

  /** SHA-256; null where the browser has none: outside of https and localhost. */
  async fingerprint() {
    const subtle = globalThis.crypto?.subtle;
    return subtle ? new Uint8Array(await subtle.digest("SHA-256", this.plain)) : null;
  }

  /** True if `pieces`, an array of bytes by id, are the same tokens. Control tokens may be written in any way. */
  agrees(pieces) {
    if (pieces.length < this.size) return false;
    return this.pieces.every((piece, token) => this.control.has(token) || equal(piece, pieces[token]));
  }

  /** The bytes of tokens as text. decoder: a TextDecoder that keeps an unfinished character for the next tokens. */
  text(tokens, decoder = new TextDecoder()) {
    let text = "";
    for (const token of tokens) {
      if (this.control.has(token) || !this.pieces[token]) continue;
      text += decoder.decode(this.pieces[token], { stream: true });
    }
    return text;
  }
}

const equal = (a, b) => a.length === b.length && a.every((byte, i) => byte === b[i]);
