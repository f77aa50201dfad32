// The arguments of a pass: the model, its KV cache, and the rows. Mirrored in library.py.
#pragma once

#include "formats.h"

constexpr int kSubBlock = 16;   // tokens whose keys lie together, and whose values do
constexpr int kChunk = 256;     // keys of one softmax; chunks are joined in order (online softmax)

constexpr int kMaxHeadDim = 256;

// 16-bit numbers in a sub-block of keys or of values: its codes and scales.
constexpr int64_t sub_block_size(int head_dim) { return kSubBlock * (head_dim + 2); }

struct Layer {
    Linear q, k, v, o, gate, up, down;
    const float *attn_norm, *ffn_norm;                    // [width padded]
    const float *q_bias, *k_bias, *v_bias, *o_bias;       // may be null
    const float *q_norm, *k_norm;                         // [head_dim], may be null
    const float *post_attn_norm, *post_ffn_norm;          // [width padded], may be null
    const float* sinks;                                   // [heads]: a score without a value; may be null
    const float* router;                                  // [experts][width], or null: then gate, up, down are used
    const float* router_bias;                             // [experts], may be null
    const Linear* experts;                                // [experts][3]: gate, up, down
    const float* const* expert_biases;                    // [experts][3], may be null
    int32_t local;                                        // attends to the window, with the local rotations
    int32_t reserved;
};

// SiLU; tanh's GELU; gate * sigmoid(slope * gate) * (up + 1), both clamped before.
enum Activation : int32_t { kSilu, kGeluTanh, kClampedSwiglu };

struct Model {
    int32_t layers, width, heads, kv_heads, head_dim, ff_width, vocab;
    int32_t window;                      // keys that a local layer sees, a row's own included
    int32_t experts, experts_used;       // 0 where no layer has any
    int32_t renormalise;                 // the weights of the experts used add up to 1
    int32_t activation;                  // an Activation
    float norm_eps, attn_scale, embed_scale;
    float attn_softcap, logit_softcap;   // 0: none
    float gate_limit, gate_slope;        // of kClampedSwiglu
    int32_t reserved;
    const Layer* layer;
    Linear embed, head;
    const float* norm;
    // The cache, [layers][kv_heads][sub_blocks]: 16-bit codes as a dot product of pairs takes them, then a float for
    // each of the 16 tokens, the scale of its codes.
    int16_t* keys;       // codes [head_dim / 2][16][2]
    int16_t* values;     // codes [8][head_dim][2]: of two tokens side by side
    int64_t sub_blocks;
};

// Rows of one sequence at consecutive positions, which see every key before them.
struct Span {
    int32_t first;     // index into Pass.span_rows
    int32_t count;
    int32_t start;     // position of the first row
    int32_t table;     // index into Pass.tables: the sub-block of positions 0..15, of 16..31, ...
};

struct Pass {
    int32_t rows, spans, scored, taps, copies, layers;
    const int32_t* tokens;        // [rows]
    const float *cosines, *sines; // [rows][head_dim / 2]
    const float *local_cosines, *local_sines;  // the same for local layers
    const Span* span;
    const int32_t* span_rows;     // every row once
    const int32_t* tables;
    const int32_t* write_starts;  // [rows + 1]: row r's keys go to slots writes[write_starts[r]..]
    const int32_t* writes;        // 16 * sub-block + token
    const int32_t* copy;          // [copies][2]: sub-blocks to copy before each layer, from and to
    const int32_t* scored_rows;   // [scored], ascending
    const int32_t* tap_layers;    // [taps], ascending
    const int32_t* run_layers;    // [layers], ascending, at least one: those to run
    float* logits;                // [scored][vocab]
    float* hidden;                // [taps][rows][width]
};
