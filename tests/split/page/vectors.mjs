// The page's codec, vocabulary and n-gram drafter against what Python computes. stdin: vectors as JSON.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const folder = process.argv[2];
const { WireError, decode, encode, extendHash } = await import(`${folder}/wire.js`);
const { Vocabulary } = await import(`${folder}/vocabulary.js`);
const { NgramDrafter } = await import(`${folder}/ngram.js`);
const vectors = JSON.parse(readFileSync(0, "utf-8"));
const bytes = (hex) => Uint8Array.from(Buffer.from(hex, "hex"));
const hex = (data) => Buffer.from(data).toString("hex");
const BINARY = ["fingerprint", "secret"];
/** JSON has neither bytes nor 64-bit numbers. */
const typed = (fields) => Object.fromEntries(Object.entries(fields).map(([name, value]) => {
  if (name === "hash") return [name, BigInt(value)];
  return [name, BINARY.includes(name) ? bytes(value) : value];
}));
const plain = (fields) => Object.fromEntries(Object.entries(fields).map(([name, value]) => {
  if (typeof value === "bigint") return [name, String(value)];
  return [name, value instanceof Uint8Array ? hex(value) : value];
}));

for (const { tokens, hash } of vectors.hashes) assert.equal(String(extendHash(0xcbf29ce484222325n, tokens)), hash);
for (const { type, fields, data } of vectors.client) assert.equal(hex(encode[type](typed(fields))), data, type);
for (const { type, fields, data } of vectors.server) assert.deepEqual(plain(decode(bytes(data))), { type, ...fields }, type);
for (const data of vectors.wrong) assert.throws(() => decode(bytes(data)), WireError, data);
assert.throws(() => encode.draft({ number: 1, base: 0, hash: 0n, tokens: Array(65).fill(1) }), WireError);
assert.throws(() => encode.draft({ number: 1, base: 0, hash: 0n, tokens: [1 << 24] }), WireError);

const vocabulary = new Vocabulary(bytes(vectors.vocabulary.data));
assert.equal(hex(await vocabulary.fingerprint()), vectors.vocabulary.fingerprint);
assert.deepEqual([...vocabulary.control], vectors.vocabulary.control);
for (const { tokens, text } of vectors.vocabulary.texts) assert.equal(vocabulary.text(tokens), text);
assert.ok(vocabulary.agrees(vectors.vocabulary.pieces.map(bytes)));
assert.ok(!vocabulary.agrees(vectors.vocabulary.pieces.map(bytes).reverse()));
assert.throws(() => new Vocabulary(bytes(vectors.vocabulary.data.slice(0, -2))), WireError);

for (const { asks } of vectors.ngram) {
  const drafter = new NgramDrafter();
  for (const { tokens, after, count, drafted } of asks) assert.deepEqual(await drafter.draft(tokens, after, count), drafted);
}
const counts = { client: vectors.client.length, server: vectors.server.length, wrong: vectors.wrong.length, ngram: vectors.ngram.length };
console.log(JSON.stringify(counts));
