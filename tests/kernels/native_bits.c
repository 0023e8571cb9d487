// Prints hashes of what the native library computes from fixed random numbers, to compare one kind of CPU with another:
// a line for each type of weights and activations, and for a small model's prompt, trees and plain steps.
#include "native.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Pool *tf_pool_new(int threads);
size_t tf_packed_bytes(int kind, int rows, int columns);
void tf_pack(Pool *pool, int kind, const uint8_t *source, int rows, int columns, uint8_t *out);
void tf_embed(const Matrix *m, const int64_t *tokens, int count, float *out);
size_t tf_matmul_scratch(int columns);
void tf_matmul(Pool *pool, const Matrix *m, int mode, const float *x, int rows, float *out, uint8_t *scratch);
size_t tf_step_scratch(const Model *m, int threads);
size_t tf_step_scores(int threads, int64_t span);
int tf_step(Pool *pool, const Model *m, const LayerState *states, const Step *s, uint8_t *scratch, float *scores);

static const int FILE_BYTES[] = {34, 144, 176, 210, 22, 18, 18, 136, 2, 2, 4}, FILE_COLUMNS[] = {32, 256, 256, 256, 32, 32, 32, 256, 1, 1, 1};
static uint32_t state = 12345;
static uint32_t next(void) {
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  return state;
}
static float small(void) { return (float)((int)(next() % 2001) - 1000) / 4096; }
static uint64_t hash(const void *data, size_t size) {
  uint64_t h = 14695981039346656037ull;
  for (size_t i = 0; i < size; i++) h = (h ^ ((const uint8_t *)data)[i]) * 1099511628211ull;
  return h;
}
static void *zeros(size_t size) { return memset(aligned_alloc(64, (size + 63) / 64 * 64), 0, size); }

// Random weights as they are in a file, with scales of a usual size.
static uint8_t *weights(int kind, int rows, int columns) {
  size_t blocks = (size_t)rows * columns / FILE_COLUMNS[kind], size = FILE_BYTES[kind];
  uint8_t *data = zeros(blocks * size + 64);
  for (size_t i = 0; i < blocks; i++) {
    uint8_t *block = data + i * size;
    float value = small();
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t half = (uint16_t)(0x2000 | (next() & 0x83ff)), brain = (uint16_t)(bits >> 16);
    for (size_t j = 0; j < size; j++) block[j] = (uint8_t)next();
    if (kind == F32) memcpy(block, &value, 4);
    else if (kind == BF16) memcpy(block, &brain, 2);
    else memcpy(block + (kind == Q6_K ? 208 : 0), &half, 2);
    if (kind == Q4_K || kind == Q5_K) memcpy(block + 2, &half, 2);
  }
  return data;
}

static Matrix packed(Pool *pool, int kind, int rows, int columns) {
  uint8_t *out = zeros(tf_packed_bytes(kind, rows, columns)), *source = weights(kind, rows, columns);
  tf_pack(pool, kind, source, rows, columns, out);
  free(source);
  return (Matrix){kind, rows, columns, out, NULL};
}

static float *floats(int count, float base) {
  float *out = zeros(4 * (size_t)count);
  for (int i = 0; i < count; i++) out[i] = base + small();
  return out;
}

static void matmuls(Pool *pool) {
  enum { N = 61, K = 512, R = 11 };
  float *out = zeros(4 * R * K), *x = floats(R * K, 0);
  uint8_t *scratch = zeros(tf_matmul_scratch(K));
  int64_t tokens[] = {0, 60, 17};
  for (int kind = 0; kind < KINDS; kind++) {
    Matrix m = packed(pool, kind, N, K);
    for (int mode = INT8; mode <= INT16; mode++) {
      tf_matmul(pool, &m, mode, x, R, out, scratch);
      printf("matmul %d %d %016llx\n", kind, mode, (unsigned long long)hash(out, 4 * R * N));
    }
    tf_embed(&m, tokens, 3, out);
    printf("embed %d %016llx\n", kind, (unsigned long long)hash(out, 4 * 3 * K));
  }
}

enum { W = 64, F = 128, V = 96, D = 32, S = 32, CTX = 128 };

static LayerState states_of(const Model *m, int format) {
  size_t rows = (size_t)2 * 64 * D, width = (size_t)(2 * m->key_heads + m->value_heads) * S;
  Cache cache = {zeros(2 * rows * 4), (int64_t)rows * (format == CACHE_F32 ? 4 : format == CACHE_F16 ? 2 : 1), 0, zeros(rows), (int64_t)rows / 16, 0, format};
  cache.head_stride = cache.page_stride / 2, cache.scales_head = cache.scales_page / 2;
  LayerState s = {.k = cache, .v = cache, .state = zeros(4 * 2 * S * S), .window = zeros(4 * 3 * width)};
  s.v.data = zeros(2 * rows * 4), s.v.scales = zeros(rows);
  s.inputs = zeros(4 * 64 * width), s.gates = zeros(4 * 64 * 4);
  return s;
}

// A prompt, then a tree whose path of rows 0, 2 and 4 is decoded plainly, too: the same bits.
static void model(int threads, int format) {
  state = 777;
  Pool *pool = tf_pool_new(threads);
  Layer layers[2] = {{.attention = 0, .inputs = 4}, {.attention = 1, .inputs = 3}};
  float *norms = floats(8 * F, 1);
  Model m = {W, F, 2, 2, D, D, 0, 1, 1, 2, S, 4, INT16, 2, 0, 1e-6f, floats(D / 2, 0.5f), norms, {0}, {0}, layers};
  m.embedding = m.head = packed(pool, Q8_0, V, W);
  int wide[2][4] = {{4 * S, 2 * S, 2, 2}, {2 * 2 * D, 2 * D, 2 * D, 0}};
  for (int i = 0; i < 2; i++) {
    Layer *l = &layers[i];
    for (int j = 0; j < l->inputs; j++) l->in[j] = packed(pool, wide[i][j] > 2 ? Q5_0 : F32, wide[i][j], W);
    l->out = packed(pool, Q8_0, W, 2 * D), l->gate = packed(pool, Q4_0, F, W), l->up = packed(pool, F16, F, W);
    l->down = packed(pool, IQ4_NL, W, F);
    l->norm = l->ffn_norm = l->q_norm = l->k_norm = l->state_norm = norms;
    l->conv = floats(4 * 4 * S, 0.2f), l->decay = floats(2, -1), l->time_bias = floats(2, 0);
  }
  LayerState one[2] = {states_of(&m, format), states_of(&m, format)}, two[2] = {states_of(&m, format), states_of(&m, format)};
  uint8_t *scratch = zeros(tf_step_scratch(&m, threads));
  float *scores = zeros(4 * tf_step_scores(threads, CTX)), *logits = zeros(4 * V * 64), *alone = zeros(4 * V), *hidden = zeros(4 * W * 64);
  int64_t prompt[40], table[2] = {1, 0}, none[1] = {0};
  for (int i = 0; i < 40; i++) prompt[i] = next() % V;
  int64_t tokens[5] = {5, 9, 11, 90, 33}, parents[5] = {-1, 0, 0, 1, 2}, root[1] = {-1};
  Step s = {.rows = 40, .chunk = 1, .page = 64, .pages = 2, .table = 2, .saved = 64, .tokens = prompt, .page_table = table, .path = none, .hidden = hidden};
  int bad = tf_step(pool, &m, one, &s, scratch, scores) | tf_step(pool, &m, two, &s, scratch, scores);
  printf("prompt %d %016llx\n", format, (unsigned long long)hash(hidden, 4 * W * 40));
  s = (Step){.rows = 5, .page = 64, .pages = 2, .table = 2, .saved = 64, .length = 40, .tokens = tokens, .parents = parents, .page_table = table, .path = none, .logits = logits};
  bad |= tf_step(pool, &m, one, &s, scratch, scores);
  printf("tree %d %016llx\n", format, (unsigned long long)hash(logits, 4 * V * 5));
  int path[3] = {0, 2, 4}, same = 1;
  for (int i = 0; i < 3; i++) {
    s.rows = 1, s.length = 40 + i, s.pending = i > 0, s.tokens = tokens + path[i], s.parents = root, s.logits = alone;
    bad |= tf_step(pool, &m, two, &s, scratch, scores);
    same &= !memcmp(alone, logits + path[i] * V, 4 * V);
  }
  printf("plain as in the tree: %s, refused: %d\n", same ? "yes" : "no", bad);
}

int main(void) {
  matmuls(tf_pool_new(1));
  state = 12345;
  matmuls(tf_pool_new(2));
  for (int format = CACHE_F32; format <= CACHE_Q8_0; format++) model(1, format), model(2, format);
  return 0;
}
