// The arguments of a block head: see heads/block.py. Mirrored in library.py.
#pragma once

#include "model.h"

// A token of the context is one row of halves, [layers][2][kv_heads][head_dim]: rotated keys, then values. A token
// is known by its number in the draft vocabulary; the last number is that of all others.
struct BlockModel {
    int32_t layers, width, heads, kv_heads, head_dim, draft_vocab, block, rank;
    float norm_eps, attn_scale, embed_scale, sure_bias;
    const Layer* layer;
    Linear embed, fc, head, markov_out;        // embed: the target's
    const float *context_norm, *norm, *mask;  // [width]
    const float* markov_in;                   // [draft_vocab + 1][rank]
    const float* sure;                        // [width + rank]
    const int64_t* ids;                       // [draft_vocab]: the tokens, ascending
    const char* weights;                      // where all but `embed` and `markov_in` lie
    int64_t weights_bytes;
};

struct Rotations {  // by position
    const float *cosines, *sines;  // each [head_dim / 2]
};

// Tokens of one text, as the target left them.
struct Part {
    const float* const* hidden;  // of each layer tapped: [rows][width]
    uint16_t* context;           // [rows], out
    int32_t start, rows;         // start: the position of the first
};

struct Reading {
    int32_t parts, taps;
    const Part* part;
    Rotations rotations;
};

struct Text {
    const uint16_t* context;  // [count] rows
    float* hidden;            // [slots][width], out
    float* base;              // [slots][head.outputs], out; below any logit beyond the vocabulary
    int32_t count, position;  // position: the anchor's
    int32_t anchor, reserved; // anchor: a token
};

struct Filling {
    int32_t texts, slots;  // slots: how many rows each block has
    const Text* text;
    Rotations rotations;
};

// Gumbel-max sampling of draft tokens; without it they are the likeliest. choose: a number below n; less than 0 where
// there was no memory for it.
struct SampleCall {
    int64_t (*choose)(const float* logits, const int64_t* ids, int64_t n, const void* settings, uint32_t high, uint32_t low);
    const void* settings;
    const uint32_t* keys;  // [steps][2]
};

// Draft tokens one after the other, each conditioned on the one before it.
struct Chain {
    const float *base, *hidden;  // of its block, from slot 0 on
    int32_t slot, previous;      // the first slot; the number of the token before it
    int32_t steps, reserved;
    SampleCall sample;
};

struct Chaining {
    int32_t chains, steps;  // steps: of the longest
    const Chain* chain;
    int32_t* numbers;       // [chains][steps], out
    float* sure;            // [chains][steps], out: logits of confidence
    float* logits;          // [chains][head.outputs], out, of the last step; may be null
};

// One after the other, each of which may be of nothing: a text may see what is read, a chain what is filled.
struct Drafting {
    Reading reading;
    Filling filling;
    Chaining chaining;
};
