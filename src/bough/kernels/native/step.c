// One forward pass of a decoder over a step's rows: a tree after the committed tokens, or a chunk of prompt text.
//
// All threads run `step_body`. Work between two barriers is one list of items (rows, tiles, heads) that threads
// claim; a sum is never divided among them. Every result of a row depends on its path alone: attention adds
// keys in the order of positions, the delta rule advances a state along the path by the operations of a commit.
#include "native.h"
#include "simd.h"

#include <stdlib.h>

enum { BATCH = 16 };     // query heads of rows that read a KV head's keys together
enum { KEY_BLOCK = 16 }; // keys that stay in the L1 cache meanwhile

typedef struct {
  const Model *m;
  const Step *s;
  const LayerState *states;
  const Block *block;  // of a draft; the step is then empty
  const Ring *rings;
  int R, P, channels, inner, in_width, threads;
  int parent[MAX_ROWS], depth[MAX_ROWS], first[MAX_ROWS], sibling[MAX_ROWS], root;
  uint8_t path[MAX_ROWS][MAX_ROWS];  // rows from the root to a row
  float *x, *n, *in, *h, *out, *mid, *up, *qkv, *decay, *beta, *cos, *sin, *kv, *rotated;
  int widest;  // columns of a matrix
  float *own;       // a thread's memory for the delta rule and for KV rows as floats
  size_t own_size;  // floats a thread
  float *scores;    // [threads, BATCH, span]
  size_t span;
  uint8_t *act_memory;
  size_t act_size;
  Act act[MAX_ROWS];
} Run;

static int max(int a, int b) { return a > b ? a : b; }
static int min(int a, int b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int up8(int n) { return (n + 7) / 8 * 8; }

// ---------------------------------------------------------------- memory

static int channels_of(const Model *m) { return (2 * m->key_heads + m->value_heads) * m->state_dim; }
static int inner_of(const Model *m) { return m->value_heads * m->state_dim; }
static int columns_of(int dim) { return dim % 32 == 0 ? 32 : dim % 16 == 0 ? 16 : 8; }  // of a state, at a time

static int in_width_of(const Model *m) {
  int attention = (m->gated ? 2 : 1) * m->heads * m->head_dim + 2 * m->kv_heads * m->head_dim;
  return up8(max(attention, channels_of(m) + inner_of(m) + 2 * up8(m->value_heads)));
}

static size_t own_floats(const Model *m) {
  size_t block = (size_t)m->state_dim * columns_of(m->state_dim);
  size_t delta = (MAX_ROWS + 2) * block + 2 * MAX_ROWS * 32, kv = (size_t)(MAX_ROWS + KEY_BLOCK) * m->head_dim;
  return (delta > kv ? delta : kv) + 64;
}

// Divides `memory` among a step's buffers, or only counts their bytes.
static size_t place(Run *run, const Model *m, int threads, uint8_t *memory) {
  int channels = channels_of(m), inner = inner_of(m), heads = m->heads * m->head_dim;
  int widest = max(max(max(m->width, m->ffn), max(heads, inner)), m->features);
  size_t at = 0, R = MAX_ROWS;
  run->widest = widest;
  run->channels = channels;
  run->inner = inner;
  run->in_width = in_width_of(m);
  run->threads = threads;
  run->own_size = own_floats(m);
  run->act_size = act_bytes(widest);
#define PLACE(field, floats) run->field = memory ? (float *)(memory + at) : NULL, at += ((size_t)(floats) * 4 + 63) / 64 * 64
  PLACE(x, R * m->width);
  PLACE(n, R * m->width);
  PLACE(in, R * run->in_width);
  PLACE(h, R * max(heads, inner));
  PLACE(out, R * m->width);
  PLACE(mid, R * m->ffn);
  PLACE(up, R * m->ffn);
  PLACE(qkv, 2 * R * channels);
  PLACE(decay, 2 * R * m->value_heads);
  PLACE(beta, 2 * R * m->value_heads);
  PLACE(cos, R * m->rope_dim / 2);
  PLACE(sin, R * m->rope_dim / 2);
  PLACE(own, threads * run->own_size);
  PLACE(rotated, R * widest);
  PLACE(kv, m->features ? R * m->layers * 2 * m->kv_heads * m->head_dim : 0);
#undef PLACE
  run->act_memory = memory ? memory + at : NULL;
  return at + R * run->act_size;
}

size_t tf_step_scratch(const Model *m, int threads) {
  Run run;
  return place(&run, m, threads, NULL);
}

// Floats of attention scores for a context of `span` tokens, the step's rows included.
size_t tf_step_scores(int threads, int64_t span) { return (size_t)threads * BATCH * (size_t)((span + 15) / 8 * 8); }

// ---------------------------------------------------------------- shared parts

// Quantised matrices read a row in their basis, matrices of floats as it is.
static void round_row(Run *run, int r, const float *x, int columns, const Rotation *rotation) {
  float *rotated = run->rotated + (size_t)r * run->widest;
  if (rotation) rotate_row(rotation, x, rotated, columns);
  run->act[r] = act_at(run->act_memory + (size_t)r * run->act_size, columns);
  quantise(rotation ? rotated : x, &run->act[r], columns, run->m->mode);
  run->act[r].x = x;
}

// The basis of those of some matrices that have one.
static const Rotation *basis_of(const Matrix *m, int count) {
  while (count && !m->rotation) m++, count--;
  return count ? m->rotation : NULL;
}

// Matrices that read the same rows: their tiles are one list of items.
static void project(Run *run, Worker *worker, const Matrix *const *m, int count, float *const *out, const int *stride) {
  int total = 0;
  for (int i = 0; i < count; i++) total += tiles_of(m[i]);
  int part = run->threads == 1 ? total : total / (6 * run->threads) + 1;
  for (int a; (a = claim(worker, part, total)) < total;) {
    int b = min(a + part, total);
    for (int i = 0, at = 0; i < count; at += tiles_of(m[i++])) {
      int low = max(a - at, 0), high = min(b - at, tiles_of(m[i]));
      if (low < high) multiply(m[i], run->m->mode, low, high, run->act, run->R, out[i], (size_t)stride[i]);
    }
  }
  barrier(worker);
}

static void silu_mul(float *gate, const float *up, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 x = _mm256_loadu_ps(gate + i);
    _mm256_storeu_ps(gate + i, _mm256_mul_ps(_mm256_mul_ps(x, sigmoid8(x)), _mm256_loadu_ps(up + i)));
  }
}

static void add_to(float *x, const float *y, int n) {
  for (int i = 0; i < n; i += 8) _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
}

// ---------------------------------------------------------------- attention

static void rotate(const Run *run, int r, float *x) {
  int half = run->m->rope_dim / 2, step = run->m->interleaved ? 2 : 1, other = run->m->interleaved ? 1 : half;
  const float *cos = run->cos + (size_t)r * half, *sin = run->sin + (size_t)r * half;
  for (int i = 0; i < half; i++) {
    float a = x[step * i], b = x[step * i + other];
    x[step * i] = a * cos[i] - b * sin[i];
    x[step * i + other] = b * cos[i] + a * sin[i];
  }
}

static uint8_t *cache_row(const Run *run, const Cache *cache, int head, int64_t index) {
  static const size_t bytes[] = {[CACHE_F32] = 4, [CACHE_F16] = 2, [CACHE_Q8_0] = 1};
  size_t row = (size_t)run->m->head_dim * bytes[cache->format];
  int64_t page = run->s->page_table[index / run->s->page];
  return cache->data + page * cache->page_stride + head * cache->head_stride + (size_t)(index % run->s->page) * row;
}

static uint8_t *cache_scales(const Run *run, const Cache *cache, int head, int64_t index) {
  int64_t page = run->s->page_table[index / run->s->page];
  size_t row = (size_t)(run->m->head_dim / 32) * 2;
  return cache->scales + page * cache->scales_page + head * cache->scales_head + (size_t)(index % run->s->page) * row;
}

// Rounds 32 values to codes of 8 bits with a float16 scale, as kernels/kv_cache/reference.py does.
static void write_codes(const float *x, uint8_t *codes, uint8_t *scale) {
  const __m256 sign = _mm256_set1_ps(-0.f), half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1);
  float top = 0;
  for (int i = 0; i < 32; i++) top = fabsf(x[i]) > top || x[i] != x[i] ? fabsf(x[i]) : top;
  float d = top / 127, inverse = isinf(1 / d) ? 0 : 1 / d;
  __m256i q[4];
  for (int i = 0; i < 4; i++) {
    __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inverse));
    __m256 whole = _mm256_round_ps(v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    __m256 away = _mm256_cmp_ps(_mm256_andnot_ps(sign, _mm256_sub_ps(v, whole)), half, _CMP_GE_OQ);
    __m256 step = _mm256_and_ps(away, _mm256_or_ps(one, _mm256_and_ps(sign, v)));
    q[i] = _mm256_cvttps_epi32(_mm256_add_ps(whole, step));
  }
  __m256i low = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xd8);
  __m256i high = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[2], q[3]), 0xd8);
  _mm256_storeu_si256((__m256i *)codes, _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8));
  uint16_t stored = _cvtss_sh(d > 65504.f ? 65504.f : d, _MM_FROUND_TO_NEAREST_INT);
  memcpy(scale, &stored, 2);
}

static void read_codes(const uint8_t *codes, const uint8_t *scales, int count, float *out) {
  for (int i = 0; i < count; i += 8) {
    uint16_t h;
    memcpy(&h, scales + i / 32 * 2, 2);
    __m256 values = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i))));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(values, _mm256_set1_ps(_cvtsh_ss(h))));
  }
}

static void write_row(const Run *run, const Cache *cache, int head, int64_t index, const float *x) {
  uint8_t *to = cache_row(run, cache, head, index);
  int D = run->m->head_dim;
  if (cache->format == CACHE_F32) {
    memcpy(to, x, 4 * (size_t)D);
    return;
  }
  if (cache->format == CACHE_Q8_0) {
    uint8_t *scales = cache_scales(run, cache, head, index);
    for (int i = 0; i < D; i += 32) write_codes(x + i, to + i, scales + i / 32 * 2);
    return;
  }
  for (int i = 0; i < D; i += 8)
    _mm_storeu_si128((__m128i *)(to + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
}

// `count` rows from `index` on, all in one page, as floats: in place, or converted to `memory`.
static const float *read_rows(const Run *run, const Cache *cache, int head, int64_t index, int count, float *memory) {
  const uint8_t *from = cache_row(run, cache, head, index);
  if (cache->format == CACHE_F32) return (const float *)from;
  if (cache->format == CACHE_Q8_0) {
    read_codes(from, cache_scales(run, cache, head, index), count * run->m->head_dim, memory);
    return memory;
  }
  for (int i = 0; i < count * run->m->head_dim; i += 8) _mm256_storeu_ps(memory + i, halves_ps(from + 2 * i));
  return memory;
}

// Norms and rotates row r's queries and keys; a step's keys and values go to the KV cache.
static void write_heads(Run *run, const Layer *layer, const LayerState *state, int r) {
  const Model *m = run->m;
  int D = m->head_dim, q_step = m->gated ? 2 * D : D;
  float *q = run->in + (size_t)r * run->in_width, *k = q + m->heads * q_step, *v = k + m->kv_heads * D;
  for (int h = 0; h < m->heads; h++) {
    if (layer->q_norm) rms_norm(q + h * q_step, layer->q_norm, q + h * q_step, D, m->eps);
    rotate(run, r, q + h * q_step);
  }
  for (int h = 0; h < m->kv_heads; h++) {
    if (layer->k_norm) rms_norm(k + h * D, layer->k_norm, k + h * D, D, m->eps);
    rotate(run, r, k + h * D);
    if (run->block) continue;
    write_row(run, &state->k, h, run->s->length + r, k + h * D);
    write_row(run, &state->v, h, run->s->length + r, v + h * D);
  }
}

// Scores of a query with `count` keys, `stride` floats apart.
static void score(const float *q, const float *keys, int count, int D, size_t stride, float scale, float *out) {
  int k = 0;
  for (; k + 4 <= count; k += 4)
    _mm_storeu_ps(out + k, _mm_mul_ps(_mm_set1_ps(scale), dots4(q, keys + k * stride, stride, D)));
  for (; k < count; k++) out[k] = scale * dot(q, keys + k * stride, D);
}

static float softmax(float *s, int n) {  // turns scores to weights; returns 1 / their sum
  float top = s[0];
  for (int k = 1; k < n; k++) top = s[k] > top ? s[k] : top;
  __m256 total = _mm256_setzero_ps();
  for (int k = n; k < up8(n); k++) s[k] = -INFINITY;
  for (int k = 0; k < n; k += 8) {
    __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(s + k), _mm256_set1_ps(top)));
    _mm256_storeu_ps(s + k, e);
    if (k + 8 > n) {
      for (int i = n; i < k + 8; i++) s[i] = 0;
      e = _mm256_loadu_ps(s + k);
    }
    total = _mm256_add_ps(total, e);
  }
  return 1 / sum8(total);
}

// 8 * `vectors` columns of `add_values`.
INLINE void add_columns(int vectors, float *out, const float *weights, const float *values, int count, size_t stride) {
  __m256 acc[8];
#pragma GCC unroll 8
  for (int j = 0; j < vectors; j++) acc[j] = _mm256_loadu_ps(out + 8 * j);
  for (int k = 0; k < count; k++, values += stride) {
    __m256 w = _mm256_broadcast_ss(weights + k);
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++) acc[j] = _mm256_fmadd_ps(w, _mm256_loadu_ps(values + 8 * j), acc[j]);
  }
#pragma GCC unroll 8
  for (int j = 0; j < vectors; j++) _mm256_storeu_ps(out + 8 * j, acc[j]);
}

// out += weights times `count` rows of values, `stride` floats apart.
static void add_values(float *out, const float *weights, const float *values, int count, int D, size_t stride) {
  int c = 0;
  for (; c + 64 <= D; c += 64) add_columns(8, out + c, weights, values + c, count, stride);
  for (; c + 16 <= D; c += 16) add_columns(2, out + c, weights, values + c, count, stride);
  for (; c < D; c += 8) add_columns(1, out + c, weights, values + c, count, stride);
}

// Query heads [from, to) of KV head g, counted row by row, attend to the committed tokens, then to their ancestors.
static void attend(Run *run, Worker *worker, const LayerState *state, int g, int from, int to) {
  const Model *m = run->m;
  int D = m->head_dim, group = m->heads / m->kv_heads, q_step = m->gated ? 2 * D : D, R = run->R, count = to - from;
  int64_t L = run->s->length;
  float *memory = run->own + worker->id * run->own_size, *tail = memory + (size_t)KEY_BLOCK * D;
  float *scores = run->scores + (size_t)worker->id * BATCH * run->span, scale = 1 / sqrtf((float)D), inverse[BATCH];
  const float *q[BATCH], *own[MAX_ROWS];
  float *out[BATCH];
  int row[BATCH];
  for (int i = 0; i < count; i++) {
    int h = g * group + (from + i) % group;
    row[i] = (from + i) / group;
    q[i] = run->in + (size_t)row[i] * run->in_width + h * q_step;
    out[i] = run->h + ((size_t)row[i] * m->heads + h) * D;
    memset(out[i], 0, 4 * (size_t)D);
  }
  for (int64_t k0 = 0; k0 < L; k0 += KEY_BLOCK) {
    int n = (int)(L - k0 < KEY_BLOCK ? L - k0 : KEY_BLOCK);
    const float *keys = read_rows(run, &state->k, g, k0, n, memory);
    for (int i = 0; i < count; i++) score(q[i], keys, n, D, (size_t)D, scale, scores + i * run->span + k0);
  }
  for (int r = 0; r < R; r++) own[r] = read_rows(run, &state->k, g, L + r, 1, tail + (size_t)r * D);
  for (int i = 0; i < count; i++) {
    float *s = scores + i * run->span;
    int r = row[i], n = run->depth[r] + 1;
    for (int d = 0; d < n; d++) s[L + d] = scale * dot(q[i], own[run->path[r][d]], D);
    inverse[i] = softmax(s, (int)L + n);
  }
  for (int64_t k0 = 0; k0 < L; k0 += KEY_BLOCK) {
    int n = (int)(L - k0 < KEY_BLOCK ? L - k0 : KEY_BLOCK);
    const float *values = read_rows(run, &state->v, g, k0, n, memory);
    for (int i = 0; i < count; i++) add_values(out[i], scores + i * run->span + k0, values, n, D, (size_t)D);
  }
  for (int r = 0; r < R; r++) own[r] = read_rows(run, &state->v, g, L + r, 1, tail + (size_t)r * D);
  for (int i = 0; i < count; i++) {
    int r = row[i];
    for (int d = 0; d <= run->depth[r]; d++) add_values(out[i], scores + i * run->span + L + d, own[run->path[r][d]], 1, D, 0);
    __m256 all = _mm256_set1_ps(inverse[i]);
    for (int c = 0; c < D; c += 8) {
      __m256 o = _mm256_mul_ps(_mm256_loadu_ps(out[i] + c), all);
      if (m->gated) o = _mm256_mul_ps(o, sigmoid8(_mm256_loadu_ps(q[i] + D + c)));
      _mm256_storeu_ps(out[i] + c, o);
    }
  }
}

// The same for a draft's block: over the positions in the ring, then over the rows of the block.
static void attend_ring(Run *run, Worker *worker, const Ring *ring, int g, int from, int to) {
  const Model *m = run->m;
  const Block *block = run->block;
  int D = m->head_dim, group = m->heads / m->kv_heads, R = run->R, count = to - from;
  size_t stride = (size_t)m->kv_heads * D, kv = (size_t)(m->heads + g) * D;
  int64_t L = block->length, low = max64(max64(block->start, L - ring->ring), ring->window ? L - ring->window + 1 : 0);
  float *scores = run->scores + (size_t)worker->id * BATCH * run->span, scale = 1 / sqrtf((float)D);
  for (int pass = 0; pass < 2; pass++) {  // scores, then values
    for (int64_t p = low; p < L;) {
      int at = (int)(p % ring->ring), n = (int)min64(min64(KEY_BLOCK, L - p), ring->ring - at);
      const float *rows = (pass ? ring->v : ring->k) + at * stride + (size_t)g * D;
      for (int i = 0; i < count; i++) {
        int r = (from + i) / group, h = g * group + (from + i) % group;
        float *s = scores + i * run->span + (p - low);
        const float *q = run->in + (size_t)r * run->in_width + h * D;
        if (pass) {
          add_values(run->h + ((size_t)r * m->heads + h) * D, s, rows, n, D, stride);
          continue;
        }
        score(q, rows, n, D, stride, scale, s);
        for (int k = 0; ring->window && k < n; k++)
          if (L + r - (p + k) >= ring->window) s[k] = -INFINITY;
      }
      p += n;
    }
    for (int i = 0; i < count; i++) {
      int r = (from + i) / group, h = g * group + (from + i) % group, seen = (int)(L - low);
      float *s = scores + i * run->span, *out = run->h + ((size_t)r * m->heads + h) * D;
      const float *q = run->in + (size_t)r * run->in_width + h * D;
      for (int j = 0; j < R; j++) {
        const float *own = run->in + (size_t)j * run->in_width + kv + (pass ? stride : 0);
        int hidden = (ring->causal && j > r) || (ring->window && abs(j - r) >= ring->window);
        if (pass) add_values(out, s + seen + j, own, 1, D, 0);
        else s[seen + j] = hidden ? -INFINITY : scale * dot(q, own, D);
      }
      if (pass) continue;
      float inverse = softmax(s, seen + R);
      for (int k = 0; k < seen + R; k++) s[k] *= inverse;
      memset(out, 0, 4 * (size_t)D);
    }
  }
}

static void attention(Run *run, Worker *worker, const Layer *layer, const LayerState *state) {
  const Model *m = run->m;
  for (int r; (r = claim(worker, 1, run->R)) < run->R;) write_heads(run, layer, state, r);
  barrier(worker);
  int items = run->R * (m->heads / m->kv_heads);  // of each KV head
  int size = max(1, min(BATCH, items * m->kv_heads / run->threads)), batches = (items + size - 1) / size;
  int total = batches * m->kv_heads;
  for (int b; (b = claim(worker, 1, total)) < total;) {
    int from = b % batches * size;
    if (run->block) attend_ring(run, worker, &run->rings[layer - m->layer], b / batches, from, min(from + size, items));
    else attend(run, worker, state, b / batches, from, min(from + size, items));
  }
  barrier(worker);
  for (int r; (r = claim(worker, 1, run->R)) < run->R;)
    round_row(run, r, run->h + (size_t)r * m->heads * m->head_dim, m->heads * m->head_dim, layer->out.rotation);
  barrier(worker);
}

// ---------------------------------------------------------------- Gated DeltaNet

// Input `at` of the convolution: below 0 in the window, then the pending rows, then the step's rows.
static const float *conv_input(const Run *run, const LayerState *state, int at) {
  if (at < 0) return state->window + (size_t)(run->m->conv_width - 1 + at) * run->channels;
  if (at < run->P) return state->inputs + (size_t)run->s->path[at] * run->channels;
  return run->in + (size_t)(at - run->P) * run->in_width;
}

static int conv_above(const Run *run, int at) {
  if (at < run->P) return at - 1;
  int parent = run->parent[at - run->P];
  return parent < 0 ? run->P - 1 : run->P + parent;
}

// Head h of the convolution's outputs, of pending and new rows; queries and keys at unit length.
static void conv_head(Run *run, const Layer *layer, const LayerState *state, int h) {
  const Model *m = run->m;
  int D = m->state_dim, W = m->conv_width;
  for (int at = h < m->key_heads ? run->P : 0; at < run->P + run->R; at++) {
    const float *in[8];
    float *out = run->qkv + (size_t)at * run->channels + h * D;
    for (int t = W - 1, from = at; t >= 0; t--, from = conv_above(run, from)) in[t] = conv_input(run, state, from) + h * D;
    for (int i = 0; i < D; i += 8) {
      __m256 s = _mm256_setzero_ps();
      for (int t = 0; t < W; t++)
        s = _mm256_fmadd_ps(_mm256_loadu_ps(in[t] + i), _mm256_loadu_ps(layer->conv + (size_t)t * run->channels + h * D + i), s);
      _mm256_storeu_ps(out + i, _mm256_mul_ps(s, sigmoid8(s)));
    }
    if (h < 2 * m->key_heads) {
      float f = 1 / sqrtf(dot(out, out, D) + 1e-6f);
      if (h < m->key_heads) f /= sqrtf((float)D);
      for (int i = 0; i < D; i++) out[i] *= f;
    }
  }
}

// Decay and write strength of pending and new rows; a row's log decay and strength are left in `in`.
static void delta_gates(Run *run, const Layer *layer, const LayerState *state) {
  int H = run->m->value_heads;
  for (int at = 0; at < run->P + run->R; at++)
    for (int h = 0; h < H; h++) {
      float log_decay, beta;
      if (at < run->P) {
        const float *gates = state->gates + (size_t)run->s->path[at] * 2 * H;
        log_decay = gates[h];
        beta = gates[H + h];
      } else {
        float *in = run->in + (size_t)(at - run->P) * run->in_width + run->channels + run->inner;
        float x = in[up8(H) + h] + layer->time_bias[h];
        in[up8(H) + h] = log_decay = layer->decay[h] * (x > 20 ? x : log1pf(expf(x)));
        in[h] = beta = 1 / (1 + expf(-in[h]));
      }
      run->decay[at * H + h] = expf(log_decay);
      run->beta[at * H + h] = beta;
    }
}

// dst = src * decay + k^T u if `advance`, else dst as it is; then `ks` = k dst, `qs` = q dst if asked for.
INLINE void sweep(int vectors, int D, const float *src, float *dst, int advance, const float *k_of, const float *u, float decay,
                  const float *k, float *ks, const float *q, float *qs) {
  __m256 a[4], z[4], w[4], g = _mm256_set1_ps(decay);
  for (int j = 0; j < vectors; j++) {
    a[j] = z[j] = _mm256_setzero_ps();
    if (advance) w[j] = _mm256_loadu_ps(u + 8 * j);
  }
  for (int i = 0; i < D; i++, src += 8 * vectors, dst += 8 * vectors) {
    __m256 s[4];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) {
      if (advance) {
        s[j] = _mm256_fmadd_ps(_mm256_broadcast_ss(k_of + i), w[j], _mm256_mul_ps(g, _mm256_loadu_ps(src + 8 * j)));
        _mm256_storeu_ps(dst + 8 * j, s[j]);
      } else {
        s[j] = _mm256_loadu_ps(dst + 8 * j);
      }
      if (k) a[j] = _mm256_fmadd_ps(_mm256_broadcast_ss(k + i), s[j], a[j]);
      if (q) z[j] = _mm256_fmadd_ps(_mm256_broadcast_ss(q + i), s[j], z[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < vectors; j++) {
    if (k) _mm256_storeu_ps(ks + 8 * j, a[j]);
    if (q) _mm256_storeu_ps(qs + 8 * j, z[j]);
  }
}

// Some columns of one head's state; a thread's memory for them.
typedef struct { Run *run; int head, column, vectors; float *u; } Columns;

static const float *key_of(const Columns *c, int at) {
  const Model *m = c->run->m;
  return c->run->qkv + (size_t)at * c->run->channels + (m->key_heads + c->head % m->key_heads) * m->state_dim;
}

INLINE void sweep_of(const Columns *c, const float *src, float *dst, int from, const float *k, float *ks, const float *q, float *qs) {
  int D = c->run->m->state_dim, H = c->run->m->value_heads;
  const float *k_of = from < 0 ? NULL : key_of(c, from), *u = from < 0 ? NULL : c->u + 32 * from;
  float decay = from < 0 ? 1 : c->run->decay[from * H + c->head];
#define SWEEP(V, A, K, Q) sweep(V, D, src, dst, A, k_of, u, decay, K ? k : NULL, ks, Q ? q : NULL, qs)
#define SWEEPS(A, K, Q) do { if (c->vectors == 4) SWEEP(4, A, K, Q); else if (c->vectors == 2) SWEEP(2, A, K, Q); else SWEEP(1, A, K, Q); } while (0)
  if (from < 0) { if (q) SWEEPS(0, 1, 1); else SWEEPS(0, 1, 0); }
  else if (q) SWEEPS(1, 1, 1);
  else if (k) SWEEPS(1, 1, 0);
  else SWEEPS(1, 0, 0);
#undef SWEEPS
#undef SWEEP
}

// u = beta (v - decay k S): what row `at` writes with its key; ks = k S.
static void writes_of(const Columns *c, int at, const float *ks) {
  const Run *run = c->run;
  int H = run->m->value_heads, D = run->m->state_dim;
  const float *v = run->qkv + (size_t)at * run->channels + (2 * run->m->key_heads + c->head) * D + c->column;
  float decay = run->decay[at * H + c->head], beta = run->beta[at * H + c->head], *u = c->u + 32 * at;
  for (int i = 0; i < 8 * c->vectors; i++) u[i] = beta * (v[i] - decay * ks[i]);
}

// Row r and the rows below it, depth first, from the state after the row before r, in `dst`. If `from` is a row, it
// is `state` advanced over that row first. The last of several siblings may overwrite it, but a tree's root
// overwrites nothing; `spare` is free memory.
static void visit(const Columns *c, int r, const float *state, float *dst, int from, float *spare) {
  const Run *run = c->run;
  const Model *m = run->m;
  int D = m->state_dim, at = run->P + r;
  float ks[32], qs[32], *out = run->h + (size_t)r * run->inner + c->head * D + c->column;
  const float *k = key_of(c, at), *q = k - m->key_heads * D;
  sweep_of(c, state, dst, from, k, ks, q, qs);
  writes_of(c, at, ks);
  float decay = run->decay[at * m->value_heads + c->head], seen = dot(q, k, D);
  for (int i = 0; i < 8 * c->vectors; i++) out[i] = decay * qs[i] + seen * c->u[32 * at + i];
  float *next = run->sibling[r] < 0 && (run->s->chunk || run->parent[r] >= 0) ? dst : spare;
  for (int kid = run->first[r]; kid >= 0; kid = run->sibling[kid])
    visit(c, kid, dst, next, kid == run->first[r] ? at : -1, next == dst ? spare : spare + (size_t)D * 8 * c->vectors);
}

static void delta_columns(Run *run, Worker *worker, const LayerState *layer, int item) {
  const Model *m = run->m;
  int D = m->state_dim, columns = columns_of(D), per_head = D / columns, P = run->P;
  float *memory = run->own + worker->id * run->own_size, ks[32];
  float *state = layer->state + (size_t)item * D * columns;  // columns that are used together are stored together
  Columns c = {run, item / per_head, item % per_head * columns, columns / 8, memory};
  for (int at = 0; at < P; at++) {
    sweep_of(&c, state, state, at - 1, key_of(&c, at), ks, NULL, NULL);
    writes_of(&c, at, ks);
  }
  // The last pending row's update is fused with what the first root reads.
  for (int r = run->root; r >= 0; r = run->sibling[r]) visit(&c, r, state, state, r == run->root ? P - 1 : -1, memory + 2 * MAX_ROWS * 32);
  if (run->s->chunk) sweep_of(&c, state, state, P + run->R - 1, NULL, NULL, NULL, NULL);
}

// Advances the window over pending rows (and a chunk's), and saves what a commit of this tree will need.
static void save_rows(const Run *run, const LayerState *state) {
  int W = run->m->conv_width, C = run->channels, H = run->m->value_heads, end = run->s->chunk ? run->P + run->R : run->P;
  for (int w = 0; w < W - 1; w++) memmove(state->window + (size_t)w * C, conv_input(run, state, end - (W - 1) + w), 4 * (size_t)C);
  if (run->s->chunk) return;
  for (int r = 0; r < run->R; r++) {
    const float *in = run->in + (size_t)r * run->in_width, *gates = in + C + run->inner;
    memcpy(state->inputs + (size_t)r * C, in, 4 * (size_t)C);
    memcpy(state->gates + (size_t)r * 2 * H, gates + up8(H), 4 * (size_t)H);
    memcpy(state->gates + (size_t)r * 2 * H + H, gates, 4 * (size_t)H);
  }
}

static void delta(Run *run, Worker *worker, const Layer *layer, const LayerState *state) {
  const Model *m = run->m;
  int D = m->state_dim, heads = 2 * m->key_heads + m->value_heads;
  for (int h; (h = claim(worker, 1, heads + 1)) < heads + 1;)
    if (h == 0) delta_gates(run, layer, state);
    else conv_head(run, layer, state, h - 1);
  barrier(worker);
  int blocks = m->value_heads * (D / columns_of(D));
  for (int i; (i = claim(worker, 1, blocks)) < blocks;) delta_columns(run, worker, state, i);
  barrier(worker);
  for (int r; (r = claim(worker, 1, run->R + 1)) < run->R + 1;) {
    if (r == run->R) {
      save_rows(run, state);
      continue;
    }
    float *out = run->h + (size_t)r * run->inner;
    const float *gate = run->in + (size_t)r * run->in_width + run->channels;
    for (int h = 0; h < m->value_heads; h++) rms_norm(out + h * D, layer->state_norm, out + h * D, D, m->eps);
    for (int i = 0; i < run->inner; i += 8) {
      __m256 g = _mm256_loadu_ps(gate + i);
      _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(out + i), _mm256_mul_ps(g, sigmoid8(g))));
    }
    round_row(run, r, out, run->inner, layer->out.rotation);
  }
  barrier(worker);
}

// ---------------------------------------------------------------- the step

// Row r enters the next layer (or the head, with that norm): its residual stream is normed and rounded.
static void enter(Run *run, int r, const float *norm, const Rotation *rotation) {
  int W = run->m->width;
  float *n = run->n + (size_t)r * W;
  rms_norm(run->x + (size_t)r * W, norm, n, W, run->m->eps);
  round_row(run, r, n, W, rotation);
}

static void enter_layer(Run *run, int r, int layer) {
  const Model *m = run->m;
  const Layer *next = &m->layer[layer];
  if (layer < m->layers) enter(run, r, next->norm, basis_of(next->in, next->inputs));
  else enter(run, r, m->norm, m->head.rotation);
}

static void leave_layer(Run *run, int r, int layer) {
  const Model *m = run->m;
  const Step *s = run->s;
  size_t W = (size_t)m->width;
  float *x = run->x + r * W;
  add_to(x, run->out + r * W, m->width);
  for (int t = 0; t < s->taps; t++)
    if (s->tap[t] == layer && r >= s->skipped) memcpy(s->features + ((size_t)(r - s->skipped) * s->taps + t) * W, x, 4 * W);
  enter_layer(run, r, layer + 1);
  if (layer + 1 == m->layers && s->hidden) memcpy(s->hidden + r * W, run->n + r * W, 4 * W);
}

static void feed_forward(Run *run, Worker *worker, const Layer *layer, int index) {
  const Model *m = run->m;
  size_t W = (size_t)m->width, F = (size_t)m->ffn;
  for (int r; (r = claim(worker, 1, run->R)) < run->R;) {
    add_to(run->x + r * W, run->out + r * W, m->width);
    enter(run, r, layer->ffn_norm, basis_of(&layer->gate, 2));
  }
  barrier(worker);
  project(run, worker, (const Matrix *[]){&layer->gate, &layer->up}, 2, (float *[]){run->mid, run->up}, (int[]){m->ffn, m->ffn});
  for (int r; (r = claim(worker, 1, run->R)) < run->R;) {
    silu_mul(run->mid + r * F, run->up + r * F, m->ffn);
    round_row(run, r, run->mid + r * F, m->ffn, layer->down.rotation);
  }
  barrier(worker);
  project(run, worker, (const Matrix *[]){&layer->down}, 1, (float *[]){run->out}, (int[]){m->width});
  for (int r; (r = claim(worker, 1, run->R)) < run->R;) leave_layer(run, r, index);
  barrier(worker);
}

void tf_embed(const Matrix *m, const int64_t *tokens, int count, float *out);

// `axes`: the row's time, height and width, or NULL.
static void set_angles(Run *run, int r, int64_t position, const int64_t *axes) {
  int half = run->m->rope_dim / 2;
  for (int i = 0; i < half; i++) {
    float angle = (float)(axes ? axes[run->m->axes[i]] : position) * run->m->frequencies[i];
    run->cos[r * half + i] = cosf(angle);
    run->sin[r * half + i] = sinf(angle);
  }
}

static void step_body(void *arg, Worker *worker) {
  Run *run = arg;
  const Model *m = run->m;
  const Step *s = run->s;
  for (int r; (r = claim(worker, 1, run->R)) < run->R;) {
    float *x = run->x + (size_t)r * m->width;
    if (run->block) memcpy(x, run->block->in + (size_t)r * m->width, 4 * (size_t)m->width);
    else if (s->embedded) memcpy(x, s->embedded + (size_t)r * m->width, 4 * (size_t)m->width);
    else tf_embed(&m->embedding, s->tokens + r, 1, x);
    enter_layer(run, r, 0);
    int64_t position = run->block ? run->block->length + r : s->length + s->offset + run->depth[r];
    set_angles(run, r, position, s->rope ? s->rope + 3 * r : NULL);
  }
  barrier(worker);
  for (int i = 0; i < m->layers; i++) {
    const Layer *layer = &m->layer[i];
    const LayerState *state = run->block ? NULL : &run->states[i];
    const Matrix *in[4];
    float *out[4];
    int stride[4], at = 0;
    for (int j = 0; j < layer->inputs; j++) {
      in[j] = &layer->in[j];
      out[j] = run->in + at;
      stride[j] = run->in_width;
      at += up8(in[j]->rows);
    }
    project(run, worker, in, layer->inputs, out, stride);
    (layer->attention ? attention : delta)(run, worker, layer, state);
    project(run, worker, (const Matrix *[]){&layer->out}, 1, (float *[]){run->out}, (int[]){m->width});
    feed_forward(run, worker, layer, i);
  }
  if (s->logits) project(run, worker, (const Matrix *[]){&m->head}, 1, &s->logits, (int[]){m->head.rows});
}

static void link_rows(Run *run) {
  const Step *s = run->s;
  int last_root = -1, last_kid[MAX_ROWS];
  run->root = -1;
  for (int r = 0; r < run->R; r++) {
    int parent = run->parent[r] = s->chunk ? r - 1 : (int)s->parents[r];
    run->first[r] = run->sibling[r] = last_kid[r] = -1;
    run->depth[r] = parent < 0 ? 0 : run->depth[parent] + 1;
    if (parent >= 0) memcpy(run->path[r], run->path[parent], (size_t)run->depth[r]);
    run->path[r][run->depth[r]] = (uint8_t)r;
    int *last = parent < 0 ? &last_root : &last_kid[parent];
    if (*last >= 0) run->sibling[*last] = r;
    else if (parent < 0) run->root = r;
    else run->first[parent] = r;
    *last = r;
  }
}

enum { OK, BAD_ROWS, BAD_TOKEN, BAD_PARENT, BAD_PENDING, BAD_PAGE };

// What would read or write outside of a buffer.
static int check(const Model *m, const Step *s) {
  if (s->rows < 1 || s->rows > MAX_ROWS || s->skipped < 0 || s->length < 0) return BAD_ROWS;
  if (s->pending < 0 || s->pending > MAX_ROWS || s->pending > s->saved || (!s->chunk && s->rows > s->saved)) return BAD_PENDING;
  for (int i = 0; i < s->pending; i++)
    if (s->path[i] < 0 || s->path[i] >= s->saved) return BAD_PENDING;
  for (int r = 0; r < s->rows; r++) {
    if (s->tokens[r] < 0 || s->tokens[r] >= m->embedding.rows) return BAD_TOKEN;
    if (!s->chunk && (s->parents[r] < -1 || s->parents[r] >= r)) return BAD_PARENT;
  }
  int64_t used = (s->length + s->rows + s->page - 1) / s->page;
  if (used > s->table) return BAD_PAGE;
  for (int64_t i = 0; i < used; i++)
    if (s->page_table[i] < 0 || s->page_table[i] >= s->pages) return BAD_PAGE;
  return OK;
}

// Runs a step of at most MAX_ROWS rows, if `check` finds nothing wrong; parents come before their children.
int tf_step(Pool *pool, const Model *m, const LayerState *states, const Step *s, uint8_t *scratch, float *scores) {
  int wrong = check(m, s);
  if (wrong) return wrong;
  Run run = {.m = m, .s = s, .states = states, .R = s->rows, .P = s->pending, .scores = scores};
  place(&run, m, pool_threads(pool), scratch);
  run.span = (size_t)(s->length + s->rows + 15) / 8 * 8;
  link_rows(&run);
  pool_run(pool, step_body, &run);
  return OK;
}

// ---------------------------------------------------------------- the draft

static int check_block(const Model *m, const Block *b, const Ring *rings) {
  if (b->rows < 1 || b->rows > MAX_ROWS || b->length < 0 || b->start < 0 || b->start > b->length) return BAD_ROWS;
  for (int i = 0; i < m->layers; i++)
    if (rings[i].ring < 1) return BAD_PENDING;
  return OK;
}

// Hidden rows of a block of masked tokens.
int tf_draft_block(Pool *pool, const Model *m, const Ring *rings, const Block *b, uint8_t *scratch, float *scores, int64_t span) {
  int wrong = check_block(m, b, rings);
  if (wrong) return wrong;
  Step none = {.hidden = b->hidden};
  Run run = {.m = m, .s = &none, .R = b->rows, .block = b, .rings = rings, .scores = scores};
  place(&run, m, pool_threads(pool), scratch);
  run.span = (size_t)(span + 15) / 8 * 8;
  pool_run(pool, step_body, &run);
  return OK;
}

static void append_body(void *arg, Worker *worker) {
  Run *run = arg;
  const Model *m = run->m;
  const Block *b = run->block;
  int kv = m->kv_heads * m->head_dim, stride = 2 * kv * m->layers;
  size_t W = (size_t)m->width;
  const Matrix *in[2];
  for (int r; (r = claim(worker, 1, run->R)) < run->R;) {
    round_row(run, r, b->in + (size_t)r * m->features, m->features, NULL);
    set_angles(run, r, b->length + r, NULL);
  }
  barrier(worker);
  project(run, worker, (const Matrix *[]){&m->head}, 1, (float *[]){run->x}, (int[]){m->width});
  for (int r; (r = claim(worker, 1, run->R)) < run->R;) {
    rms_norm(run->x + r * W, b->norm, run->n + r * W, m->width, m->eps);
    round_row(run, r, run->n + r * W, m->width, NULL);
  }
  barrier(worker);
  for (int i = 0; i < m->layers; i++) {
    in[0] = &m->layer[i].in[1];
    in[1] = &m->layer[i].in[2];
    float *out = run->kv + (size_t)i * 2 * kv;
    project(run, worker, in, 2, (float *[]){out, out + kv}, (int[]){stride, stride});
  }
  for (int i; (i = claim(worker, 1, m->layers)) < m->layers;) {
    const Ring *ring = &run->rings[i];
    for (int r = 0; r < run->R; r++) {
      float *k = run->kv + (size_t)r * stride + (size_t)i * 2 * kv;
      size_t at = (size_t)((b->length + r) % ring->ring) * kv;
      for (int h = 0; h < m->kv_heads; h++) {
        rms_norm(k + h * m->head_dim, m->layer[i].k_norm, k + h * m->head_dim, m->head_dim, m->eps);
        rotate(run, r, k + h * m->head_dim);
      }
      memcpy(ring->k + at, k, 4 * (size_t)kv);
      memcpy(ring->v + at, k + kv, 4 * (size_t)kv);
    }
  }
}

// Adds the K and V of `rows` committed positions from b->length on to the rings, from the target's features.
int tf_draft_append(Pool *pool, const Model *m, const Ring *rings, const Block *b, uint8_t *scratch) {
  int wrong = check_block(m, b, rings);
  if (wrong) return wrong;
  Step none = {0};
  Run run = {.m = m, .s = &none, .R = b->rows, .block = b, .rings = rings};
  place(&run, m, pool_threads(pool), scratch);
  pool_run(pool, append_body, &run);
  return OK;
}
