// What Python passes to the library (mirrored in library.py), and what the sources share.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { MAX_ROWS = 64 };  // of one step
enum { Q8_0, Q4_K, Q5_K, Q6_K, Q5_0, Q4_0, IQ4_NL, IQ4_XS, Q2_0, F16, BF16, F32, KINDS };  // of packed weights
enum { PQ2_0 = KINDS, PTQ1_0, Q1_0, FILE_KINDS };  // of files alone: packed as Q2_0, with the same values
enum { INT8, INT16 };  // what activations are rounded to before a matmul with quantised weights
enum { CACHE_F32, CACHE_F16, CACHE_Q8_0 };

// Outputs of a matmul that are computed together: the 32-bit lanes of a vector.
#if defined(__AVX512VNNI__)
enum { TILE = 16 };
#else
enum { TILE = 8 };
#endif

typedef struct Pool Pool;

// The basis of a weight's columns: H diag(signs) of each block of them, read in `order` first (NULL: as they are); H is
// the normalised Walsh-Hadamard matrix.
typedef struct { int32_t block; const float *signs; const int64_t *order; } Rotation;

// A weight [rows, columns], packed by `tf_pack`; `bias` [rows], `rotation`: or NULL.
typedef struct { int32_t kind, rows, columns; const uint8_t *data; const float *bias; const Rotation *rotation; } Matrix;

// One layer's weights; which of them there are depends on the layer's kind and the model's family.
typedef struct {
  int32_t attention, inputs;
  Matrix in[4];  // attention: queries (and gates), keys, values; delta: channels, gate, beta, alpha
  Matrix out, gate, up, down;
  const float *norm, *ffn_norm, *q_norm, *k_norm;
  const float *conv, *decay, *time_bias, *state_norm;  // conv: [conv width, channels]
} Layer;

typedef struct {
  int32_t width, ffn, heads, kv_heads, head_dim, rope_dim, interleaved, gated;
  int32_t key_heads, value_heads, state_dim, conv_width;  // 0 without delta layers
  int32_t mode, layers;
  int32_t features;  // of a draft: columns of `fuse`
  float eps;
  const float *frequencies;  // [rope_dim / 2]
  const int64_t *axes;       // [rope_dim / 2] of an image that turn these pairs: time, height, width
  const float *norm;
  Matrix embedding, head;  // of a draft: none, and `fuse`
  const Layer *layer;
} Model;

// K and V of one draft layer and sequence slot: [ring, KV heads, head_dim], position p at p modulo the ring.
typedef struct { float *k, *v; int32_t ring, window, causal; } Ring;  // window 0: none

// A draft's call: a block of rows after `length` positions, those below `start` missing.
typedef struct {
  int32_t rows;
  int64_t length, start;
  const float *in;     // [rows, width] embeddings, or [rows, features] for `tf_draft_append`
  const float *norm;   // of the fused features
  float *hidden;       // [rows, width]
} Block;

// K or V of one layer: pages x KV heads x tokens of a page x head_dim; strides in bytes. Of q8_0 these are codes, and
// each 32 have a float16 scale in `scales`.
typedef struct {
  uint8_t *data;
  int64_t page_stride, head_stride;
  uint8_t *scales;
  int64_t scales_page, scales_head;
  int32_t format;
} Cache;

// One layer's buffers of one sequence slot, see models/step.py.
typedef struct { Cache k, v; float *state, *window, *inputs, *gates; } LayerState;

typedef struct {
  int32_t rows, chunk, pending, taps, skipped;
  int32_t page, pages, table, saved;  // tokens of a page, pages of the pool, of the table; rows of `inputs`
  int64_t length, offset;  // committed tokens; of rope positions over indices, after images
  const int64_t *rope;     // [rows, 3] time, height and width of a chunk with images, or NULL
  const float *embedded;   // [rows, width] what its rows are instead of their tokens' embeddings
  const int64_t *tokens, *parents, *page_table, *path;  // parents: not of a chunk; path: `pending` accepted rows
  const int32_t *tap;
  float *features;  // [rows - skipped, taps * width] or NULL
  float *hidden;    // [rows, width] or NULL
  float *logits;    // [rows, vocabulary] or NULL
} Step;

// Candidates that a tree is built from: of each of `depths` depths `width` ids, with `lines` lines of scores (1, or one
// after each candidate of the depth before and one after any other token), and whole continuations.
typedef struct {
  int64_t anchor;
  int32_t depths, width, lines, chain_count, nodes, rows, edge_count;
  float spine;
  const int64_t *ids;         // [depths, width]
  const float *scores;        // [depths, lines, width]
  const int64_t *chains;      // [chain_count, depths], -1 after their end
  const float *chain_scores;  // [chain_count, depths]
  const float *edges, *table; // of a calibration, or NULL: [edge_count], [bins, edge_count + 1]
  const int64_t *depth_bins;  // [depths]
} Proposal;

// A row of activations: integers with a scale per 32 columns, and the floats themselves.
typedef struct {
  const float *x;
  int8_t *q8;     // INT8, or with dot products of bytes the high bytes of 16-bit integers
  int8_t *low;    // their low bytes, signed: q = 256 q8 + low
  int16_t *q16;   // 16-bit integers without them
  float *scale;  // per 32 columns
  float *sum;    // per 32 columns: scale times the sum of the integers
  float *half;   // the same per 16 columns
  int32_t *whole;  // per 32 columns: the sum of the integers
} Act;

size_t act_bytes(int columns);
Act act_at(uint8_t *memory, int columns);
void quantise(const float *x, Act *act, int columns, int mode);
void rotate_row(const Rotation *rotation, const float *x, float *out, int columns);
// Outputs of tiles t0 to t1 - 1, TILE columns each, of `rows` rows; `out` has `stride` floats a row.
void multiply(const Matrix *m, int mode, int t0, int t1, const Act *act, int rows, float *out, size_t stride);
static inline int tiles_of(const Matrix *m) { return (m->rows + TILE - 1) / TILE; }

// Threads: `pool_run` calls body(arg, worker) here and in the threads that are free. A thread may come late and find
// phases over, so what it reads outside of items must not change during the job.
typedef struct { Pool *pool; int id; unsigned phase; int held; } Worker;
typedef void Body(void *arg, Worker *worker);
void pool_run(Pool *pool, Body *body, void *arg);
int pool_threads(const Pool *pool);
// The first of up to `count` of a phase's `total` items that nobody has yet; `total`: none is left. Items that the
// thread had before are done.
int claim(Worker *worker, int count, int total);
void barrier(Worker *worker);  // waits for the phase's items and begins the next phase
