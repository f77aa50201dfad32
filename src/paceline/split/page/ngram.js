// Prompt lookup: the tokens that followed the latest occurrence of the last n tokens. A mirror of drafters/ngram.py.

export class NgramDrafter {
  name = "ngram";

  constructor(sizes = [4, 3, 2]) {
    this.sizes = [...sizes].sort((a, b) => b - a);
    this.reset();
  }

  reset() {
    this.tokens = []; // those that are indexed
    this.after = this.sizes.map(() => new Map()); // n-gram -> position right after its latest occurrence
  }

  /** `count` tokens that may follow the text `tokens` and `after`, which is drafted already; or none. */
  async draft(tokens, after, count) {
    this.#catchUp(tokens);
    const tail = [...tokens.slice(-this.sizes[0]), ...after];
    for (const [i, n] of this.sizes.entries()) {
      if (tail.length < n) continue;
      const position = this.after[i].get(key(tail, tail.length - n, n));
      if (position === undefined) continue;
      // A copy that reaches the end of the text continues with itself, as repetitions do.
      const source = [...tokens.slice(position, position + count), ...after];
      return Array.from({ length: count }, (_, k) => source[k % source.length]);
    }
    return [];
  }

  #catchUp(tokens) {
    let common = 0;
    const limit = Math.min(this.tokens.length, tokens.length);
    while (common < limit && this.tokens[common] === tokens[common]) common += 1;
    if (common < this.tokens.length) { // another text: positions of tokens that went are of no use
      this.reset();
      common = 0;
    }
    for (const [i, n] of this.sizes.entries()) {
      // A position is indexed once a token stands there, so the end of the text never matches itself.
      for (let position = Math.max(common, n); position < tokens.length; position += 1) this.after[i].set(key(tokens, position - n, n), position);
    }
    this.tokens = tokens.slice();
  }
}

const key = (tokens, from, n) => tokens.slice(from, from + n).join(",");
