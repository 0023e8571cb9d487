// Packed weights and their matmul with rounded activations.
//
// Quantised types: tiles of TILE (8 or 16) output rows, blocks of 32 columns. A vector of code bytes holds TILE rows x
// 4 columns, a 32-bit lane belongs to one output: no horizontal sums, and an activation is a broadcast. Codes keep
// the bits that the file gives them. Float types: [tile, column, TILE rows].
//
// A row's result never depends on the other rows or on the thread: its activations are rounded by themselves,
// sums within a block are integers, and blocks are added in one order with explicit FMAs.
#include "native.h"
#include "simd.h"

#include <stdlib.h>

static const int ROW_BYTES[] = {32, 16, 20, 24, 20, 16, 16, 16, 8};  // of codes, in a block of 32 columns
static const int FILE_BYTES[] = {34, 144, 176, 210, 22, 18, 18, 136, 18, 2, 2, 4, 34, 28, 18};
static const int FILE_COLUMNS[] = {32, 256, 256, 256, 32, 32, 32, 256, 64, 1, 1, 1, 128, 128, 128};
// What the 4-bit codes of IQ4_NL and IQ4_XS stand for.
static const int8_t VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
enum { GROUP = TILE == 16 ? 8 : 4 };  // rows of activations that read a tile of weights together

INLINE int code_bytes(int kind) { return TILE * ROW_BYTES[kind]; }
static int has_super(int kind) { return kind == Q4_K || kind == Q5_K || kind == Q6_K || kind == IQ4_XS; }
static int is_signed(int kind) { return kind == Q8_0 || kind == IQ4_NL || kind == IQ4_XS; }  // the others have minima
static int is_float(int kind) { return kind >= F16 && kind < KINDS; }
INLINE float offset_of(int kind) { return kind == Q2_0 ? 1 : kind == Q5_0 ? 16 : 8; }  // of codes without minima
INLINE int packed_kind(int kind) { return kind < KINDS ? kind : Q2_0; }
static size_t up64(size_t n) { return (n + 63) / 64 * 64; }

// Where the parts of a packed matrix begin: codes, then scales of blocks, then scales of 8 blocks.
typedef struct { int tiles, blocks, supers; size_t scales, super, bytes; } Layout;

static Layout layout_of(int kind, int rows, int columns) {
  Layout l = {(rows + TILE - 1) / TILE, columns / 32, (columns / 32 + 7) / 8, 0, 0, 0};
  if (is_float(kind)) {
    l.bytes = up64((size_t)l.tiles * TILE * columns * FILE_BYTES[kind]);
    return l;
  }
  size_t blocks = (size_t)l.tiles * l.blocks;
  l.scales = up64(blocks * code_bytes(kind));
  l.super = l.scales + up64(blocks * 2 * TILE);
  l.bytes = l.super + (has_super(kind) ? up64((size_t)l.tiles * l.supers * 4 * TILE) : 0);
  return l;
}

// ---------------------------------------------------------------- packing

// Returns the bytes of a packed matrix; 0: the shape is not possible.
size_t tf_packed_bytes(int kind, int rows, int columns) {
  if (kind < 0 || kind >= FILE_KINDS || rows < 1 || columns < 1 || columns % FILE_COLUMNS[kind] || columns % 8) return 0;
  return layout_of(packed_kind(kind), rows, columns).bytes;
}

int tf_packed_kind(int kind) { return packed_kind(kind); }

// Ternary digit `place` of a block of PTQ1_0, in the order of its columns: the first digits of its bytes come first.
INLINE uint8_t digit_of(const uint8_t *block, int place) {
  static const uint8_t powers[] = {1, 3, 9, 27, 81};
  int first = place < 80 ? 0 : place < 120 ? 80 : 120, bytes = place < 80 ? 16 : place < 120 ? 8 : 2;
  uint8_t byte = block[first / 5 + (place - first) % bytes];
  return (uint8_t)((uint8_t)(byte * powers[(place - first) / bytes]) * 3 >> 8);
}

// Reads one block of 32 columns of a file's row: codes, integer scales (or minima) and float16 scales.
INLINE void read_block(int kind, const uint8_t *row, int block, uint8_t q[32], uint8_t scales[2], uint16_t d[2]) {
  int per = FILE_COLUMNS[kind] / 32, s = block % per;
  const uint8_t *p = row + (size_t)(block / per) * FILE_BYTES[kind];
  if (kind == Q8_0) {
    memcpy(d, p, 2);
    memcpy(q, p + 2, 32);
  } else if (kind == Q4_0 || kind == IQ4_NL) {
    memcpy(d, p, 2);
    for (int i = 0; i < 16; i++) q[i] = p[2 + i] & 15, q[i + 16] = p[2 + i] >> 4;
  } else if (kind == Q2_0 || kind == PQ2_0) {
    memcpy(d, p, 2);
    for (int i = 0; i < 32; i++) q[i] = p[2 + 8 * s + i / 4] >> (2 * (i % 4)) & 3;
  } else if (kind == Q1_0) {
    memcpy(d, p, 2);
    for (int i = 0; i < 32; i++) q[i] = (uint8_t)((p[2 + 4 * s + i / 8] >> (i % 8) & 1) << 1);
  } else if (kind == PTQ1_0) {
    memcpy(d, p + 26, 2);
    for (int i = 0; i < 32; i++) q[i] = digit_of(p, 32 * s + i);
  } else if (kind == Q5_0) {
    uint32_t high;
    memcpy(d, p, 2);
    memcpy(&high, p + 2, 4);
    for (int i = 0; i < 16; i++) {
      q[i] = (uint8_t)((p[6 + i] & 15) | ((high >> i & 1) << 4));
      q[i + 16] = (uint8_t)((p[6 + i] >> 4) | ((high >> (i + 16) & 1) << 4));
    }
  } else if (kind == Q4_K || kind == Q5_K) {
    const uint8_t *c = p + 4, *codes = p + (kind == Q4_K ? 16 : 48) + 32 * (s / 2);
    memcpy(d, p, 4);
    if (s < 4) {
      scales[0] = c[s] & 63;
      scales[1] = c[s + 4] & 63;
    } else {
      scales[0] = (uint8_t)((c[s + 4] & 15) | ((c[s - 4] >> 6) << 4));
      scales[1] = (uint8_t)((c[s + 4] >> 4) | ((c[s] >> 6) << 4));
    }
    for (int i = 0; i < 32; i++) {
      q[i] = s & 1 ? codes[i] >> 4 : codes[i] & 15;
      if (kind == Q5_K) q[i] |= (uint8_t)((p[16 + i] >> s & 1) << 4);
    }
  } else if (kind == IQ4_XS) {
    uint16_t high;
    memcpy(d, p, 2);
    memcpy(&high, p + 2, 2);
    scales[0] = (uint8_t)(((p[4 + s / 2] >> (4 * (s % 2)) & 15) | (high >> (2 * s) & 3) << 4) - 32);
    for (int i = 0; i < 16; i++) q[i] = p[8 + 16 * s + i] & 15, q[i + 16] = p[8 + 16 * s + i] >> 4;
  } else {  // Q6_K
    int half = s / 4, part = s % 4;
    const uint8_t *low = p + 64 * half + 32 * (part & 1), *high = p + 128 + 32 * half;
    memcpy(d, p + 208, 2);
    scales[0] = p[192 + 2 * s];
    scales[1] = p[193 + 2 * s];
    for (int i = 0; i < 32; i++)
      q[i] = (uint8_t)((part < 2 ? low[i] & 15 : low[i] >> 4) | ((high[i] >> (2 * part) & 3) << 4));
  }
}

// A matrix as it is in a GGUF file, to be packed to `out`.
typedef struct { int kind, rows, columns; const uint8_t *source; uint8_t *out; } Packing;

static void pack_floats(const Packing *p, int from, int to) {
  size_t size = (size_t)FILE_BYTES[p->kind], columns = (size_t)p->columns;
  for (size_t n = (size_t)from; n < (size_t)to; n++)
    for (size_t k = 0; k < columns; k++)
      memcpy(p->out + ((n / TILE * columns + k) * TILE + n % TILE) * size, p->source + (n * columns + k) * size, size);
}

INLINE void pack_quantised(int file_kind, const Packing *p, int from, int to) {
  const uint8_t *source = p->source;
  uint8_t *out = p->out;
  const int kind = packed_kind(file_kind);
  Layout l = layout_of(kind, p->rows, p->columns);
  size_t row_bytes = (size_t)p->columns / FILE_COLUMNS[file_kind] * FILE_BYTES[file_kind];
  for (int n = from; n < to; n++)
    for (int b = 0; b < l.blocks; b++) {
      uint8_t q[32], scales[2] = {0, 0};
      uint16_t d[2] = {0, 0};
      read_block(file_kind, source + (size_t)n * row_bytes, b, q, scales, d);
      size_t at = (size_t)(n / TILE) * l.blocks + b;
      int r = n % TILE;
      uint8_t *c = out + at * code_bytes(kind) + 4 * r, *s = out + l.scales + at * 2 * TILE;
      uint32_t w[8], high[2] = {0, 0};  // a group's 4 columns in a word
      memcpy(w, q, 32);
      for (int g = 0; g < 8; g++) {
        if (kind == Q8_0) memcpy(c + 4 * TILE * g, &w[g], 4);
        if (kind == Q5_K || kind == Q5_0) high[0] |= (w[g] >> 4 & 0x01010101) << g;
        if (kind == Q6_K) high[g / 4] |= (w[g] >> 4 & 0x03030303) << (2 * (g % 4));
        if (kind == Q2_0) high[g / 4] |= w[g] << (2 * (g % 4));
      }
      for (int g = 0; g < 2 && kind == Q2_0; g++) memcpy(c + 4 * TILE * g, &high[g], 4);
      for (int g = 0; g < 4 && kind != Q8_0 && kind != Q2_0; g++) {
        uint32_t both = (w[g] & 0x0f0f0f0f) | (w[g + 4] & 0x0f0f0f0f) << 4;
        memcpy(c + 4 * TILE * g, &both, 4);
      }
      for (int h = 0; h < (ROW_BYTES[kind] - 16) / 4 && kind != Q8_0; h++) memcpy(c + 4 * TILE * (4 + h), &high[h], 4);
      if (!has_super(kind)) {
        memcpy(s + 2 * r, d, 2);
      } else {
        uint8_t *super = out + l.super + ((size_t)(n / TILE) * l.supers + b / 8) * 4 * TILE;
        s[r] = scales[0];
        s[TILE + r] = scales[1];
        memcpy(super + 2 * r, d, 2);
        memcpy(super + 2 * TILE + 2 * r, d + 1, 2);
      }
    }
}

static void pack_rows(const Packing *p, int from, int to) {
  switch (p->kind) {  // a copy of the code for each type
    case Q8_0: pack_quantised(Q8_0, p, from, to); break;
    case Q4_K: pack_quantised(Q4_K, p, from, to); break;
    case Q5_K: pack_quantised(Q5_K, p, from, to); break;
    case Q6_K: pack_quantised(Q6_K, p, from, to); break;
    case Q5_0: pack_quantised(Q5_0, p, from, to); break;
    case Q4_0: pack_quantised(Q4_0, p, from, to); break;
    case IQ4_NL: pack_quantised(IQ4_NL, p, from, to); break;
    case IQ4_XS: pack_quantised(IQ4_XS, p, from, to); break;
    case Q2_0: pack_quantised(Q2_0, p, from, to); break;
    case PQ2_0: pack_quantised(PQ2_0, p, from, to); break;
    case PTQ1_0: pack_quantised(PTQ1_0, p, from, to); break;
    case Q1_0: pack_quantised(Q1_0, p, from, to); break;
    default: pack_floats(p, from, to);
  }
}

static void packing(void *arg, Worker *worker) {
  const Packing *p = arg;
  int tiles = (p->rows + TILE - 1) / TILE;
  for (int t; (t = claim(worker, 1, tiles)) < tiles;)
    pack_rows(p, TILE * t, TILE * t + TILE < p->rows ? TILE * t + TILE : p->rows);
}

// Packs rows as they are in a GGUF file to `out`, `tf_packed_bytes` long and zero.
void tf_pack(Pool *pool, int kind, const uint8_t *source, int rows, int columns, uint8_t *out) {
  Packing p = {kind, rows, columns, source, out};
  pool_run(pool, packing, &p);
}

static float half_float(const uint8_t *p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return _cvtsh_ss(h);
}

static void unpack_float_row(const Matrix *m, int n, float *out) {
  for (int k = 0; k < m->columns; k++) {
    const uint8_t *p = m->data + (((size_t)(n / TILE) * m->columns + k) * TILE + n % TILE) * FILE_BYTES[m->kind];
    if (m->kind == F32) {
      memcpy(out + k, p, 4);
    } else if (m->kind == F16) {
      out[k] = half_float(p);
    } else {
      uint16_t h;
      memcpy(&h, p, 2);
      uint32_t bits = (uint32_t)h << 16;
      memcpy(out + k, &bits, 4);
    }
  }
}

// Row n of a packed matrix as floats: the embedding of a token where the head is tied.
static void unpack_row(const Matrix *m, int n, float *out) {
  int kind = m->kind, r = n % TILE;
  if (is_float(kind)) {
    unpack_float_row(m, n, out);
    return;
  }
  Layout l = layout_of(kind, m->rows, m->columns);
  for (int b = 0; b < l.blocks; b++) {
    size_t at = (size_t)(n / TILE) * l.blocks + b;
    const uint8_t *c = m->data + at * code_bytes(kind), *s = m->data + l.scales + at * 2 * TILE;
    const uint8_t *super = m->data + l.super + ((size_t)(n / TILE) * l.supers + b / 8) * 4 * TILE;
    float scale[2], minimum[2] = {0, 0};  // of columns 0 to 15 and 16 to 31
    if (!has_super(kind)) {
      scale[0] = scale[1] = half_float(s + 2 * r);
      if (!is_signed(kind)) minimum[0] = minimum[1] = scale[0] * offset_of(kind);
    } else if (kind == Q6_K) {
      for (int i = 0; i < 2; i++) scale[i] = half_float(super + 2 * r) * (float)(int8_t)s[TILE * i + r], minimum[i] = 32 * scale[i];
    } else if (kind == IQ4_XS) {
      scale[0] = scale[1] = half_float(super + 2 * r) * (float)(int8_t)s[r];
    } else {
      scale[0] = scale[1] = half_float(super + 2 * r) * s[r];
      minimum[0] = minimum[1] = half_float(super + 2 * TILE + 2 * r) * s[TILE + r];
    }
    for (int k = 0; k < 32; k++) {
      int g = k / 4, byte = 4 * r + k % 4, q;
      if (kind == Q8_0) {
        q = (int8_t)c[4 * TILE * g + byte];
      } else if (kind == Q2_0) {
        q = c[4 * TILE * (g / 4) + byte] >> (2 * (g % 4)) & 3;
      } else {
        q = c[4 * TILE * (g & 3) + byte] >> (g < 4 ? 0 : 4) & 15;
        if (kind == Q5_K || kind == Q5_0) q |= (c[16 * TILE + byte] >> g & 1) << 4;
        if (kind == Q6_K) q |= (c[4 * TILE * (4 + g / 4) + byte] >> (2 * (g % 4)) & 3) << 4;
        if (is_signed(kind)) q = VALUES[q];
      }
      out[32 * b + k] = scale[k / 16] * (float)q - minimum[k / 16];
    }
  }
}

// The normalised Walsh-Hadamard transform of each block, in place.
static void transform(float *x, int columns, int block) {
  float scale = (float)(1 / sqrt((double)block));
  for (int step = 1; step < block; step *= 2)
    for (int i = 0; i < columns; i += 2 * step)
      for (int j = i; j < i + step; j++) {
        float low = x[j], high = x[j + step];
        x[j] = low + high;
        x[j + step] = low - high;
      }
  for (int i = 0; i < columns; i++) x[i] *= scale;
}

// A row as a rotated matrix reads it.
void rotate_row(const Rotation *rotation, const float *x, float *out, int columns) {
  for (int i = 0; i < columns; i++) out[i] = x[rotation->order ? rotation->order[i] : i] * rotation->signs[i];
  transform(out, columns, rotation->block);
}

// Embeddings [count, columns] of tokens, all of which are rows of the matrix.
void tf_embed(const Matrix *m, const int64_t *tokens, int count, float *out) {
  for (int i = 0; i < count; i++, out += m->columns) {
    unpack_row(m, (int)tokens[i], out);
    if (!m->rotation) continue;
    transform(out, m->columns, m->rotation->block);
    for (int k = 0; k < m->columns; k++) out[k] *= m->rotation->signs[k];
  }
}

// The largest of n values; sets `nan` if there is one among them.
static float largest(const float *x, int n, int *nan) {
  __m256 top[2] = {_mm256_set1_ps(-INFINITY), _mm256_set1_ps(-INFINITY)}, bad = _mm256_setzero_ps();
  float lanes[8], most = -INFINITY;
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 2; j++) {
      __m256 v = _mm256_loadu_ps(x + i + 8 * j);
      top[j] = _mm256_max_ps(top[j], v);
      bad = _mm256_or_ps(bad, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
  *nan = _mm256_movemask_ps(bad) != 0;
  for (; i < n; i++) most = x[i] > most ? x[i] : most, *nan |= x[i] != x[i];
  _mm256_storeu_ps(lanes, _mm256_max_ps(top[0], top[1]));
  for (int j = 0; j < 8; j++) most = lanes[j] > most ? lanes[j] : most;
  return most;
}

// The first of the largest values of each row of x [rows, columns]; a NaN is the largest.
void tf_argmax(const float *x, int rows, int columns, int64_t *best) {
  for (int r = 0; r < rows; r++, x += columns) {
    const int block = 512;
    int at = 0, nan = 0;
    float top = -INFINITY;
    for (int b = 0; b < columns && !nan; b += block) {
      float most = largest(x + b, columns - b < block ? columns - b : block, &nan);
      if (nan || most > top) at = b, top = most;
    }
    while (at < columns - 1 && (nan ? x[at] == x[at] : x[at] != top)) at++;
    best[r] = at;
  }
}

// The `count` largest values of n, best first, of equal ones the first; -inf is never among them.
static void best_of(const float *x, int n, int count, float *values, int64_t *ids) {
  for (int i = 0; i < count; i++) values[i] = -INFINITY, ids[i] = 0;
  for (int b = 0; b < n; b += 8) {
    int mask = 255 >> (n - b < 8 ? 8 - (n - b) : 0);
    if (mask == 255)
      mask = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + b), _mm256_set1_ps(values[count - 1]), _CMP_GT_OQ));
    for (; mask; mask &= mask - 1) {
      int id = b + __builtin_ctz((unsigned)mask), at = count - 1;
      if (!(x[id] > values[at])) continue;
      for (; at > 0 && x[id] > values[at - 1]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
      values[at] = x[id];
      ids[at] = id;
    }
  }
}

// The `count` likeliest ids of each row of logits [rows, columns] and their log probabilities [rows, count]; returns 0
// if a row has NaN or an infinite maximum.
int tf_rank(const float *x, int rows, int columns, int count, int64_t *ids, float *scores) {
  for (int r = 0; r < rows; r++, x += columns, ids += count, scores += count) {
    int nan, i = 0;
    float top = largest(x, columns, &nan), sum;
    if (nan || isinf(top)) return 0;
    __m256 total = _mm256_setzero_ps();
    for (; i + 8 <= columns; i += 8) total = _mm256_add_ps(total, exp8(_mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(top))));
    for (sum = sum8(total); i < columns; i++) sum += expf(x[i] - top);
    best_of(x, columns, count, scores, ids);
    for (i = 0; i < count; i++) scores[i] -= top + logf(sum);
  }
  return 1;
}

// ---------------------------------------------------------------- activations

size_t act_bytes(int columns) {
  size_t blocks = (size_t)(columns + 31) / 32;
  return up64(32 * blocks * 2) + up64(4 * blocks) * 3 + up64(8 * blocks);
}

Act act_at(uint8_t *memory, int columns) {
  size_t blocks = (size_t)(columns + 31) / 32;
  Act act = {.q8 = (int8_t *)memory, .low = (int8_t *)memory + 32 * blocks, .q16 = (int16_t *)memory};
  memory += up64(32 * blocks * 2);
  act.scale = (float *)memory;
  act.sum = (float *)(memory + up64(4 * blocks));
  act.whole = (int32_t *)(memory + 2 * up64(4 * blocks));
  act.half = (float *)(memory + 3 * up64(4 * blocks));
  return act;
}

// Rounds a row to integers: each 32 columns have a scale of their own. A NaN makes the scale NaN.
void quantise(const float *x, Act *act, int columns, int mode) {
  const float limit = mode == INT8 ? 127.f : 32512.f;  // 127 * 256: the high byte stays within 8 bits
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  // The even, then the odd columns of each 4: so the even and odd bytes of weight codes come.
  static const uint8_t even_odd[32] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
                                       0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
  const __m256i order = _mm256_loadu_si256((const __m256i *)even_odd);
  act->x = x;
  for (int b = 0; b < columns / 32; b++) {
    __m256 in[4], top = _mm256_setzero_ps(), nan = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
      in[i] = _mm256_loadu_ps(x + 32 * b + 8 * i);
      top = _mm256_max_ps(top, _mm256_and_ps(in[i], magnitude));
      nan = _mm256_or_ps(nan, _mm256_cmp_ps(in[i], in[i], _CMP_UNORD_Q));
    }
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    float most = _mm256_movemask_ps(nan) ? NAN : max4(half);
    float scale = most / limit, inverse = most > 0 ? limit / most : 0;
    if (inverse > 3e38f) scale = inverse = 0;  // too small to matter, and 1 / scale overflows
    __m256i q[4];
    int32_t sum[2];
    for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(in[i], _mm256_set1_ps(inverse)));
    for (int h = 0; h < 2; h++) {
      __m256i s = _mm256_add_epi32(q[2 * h], q[2 * h + 1]);
      __m128i u = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
      u = _mm_hadd_epi32(u, u);
      sum[h] = _mm_cvtsi128_si32(_mm_hadd_epi32(u, u));
    }
    __m256i low = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xd8);
    __m256i high = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[2], q[3]), 0xd8);
    if (mode == INT8) {
      __m256i all = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
      _mm256_storeu_si256((__m256i *)(act->q8 + 32 * b), all);
    } else if (HAS_DOT) {
      __m256i first = _mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8), second = _mm256_srai_epi16(_mm256_slli_epi16(high, 8), 8);
      __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xd8);
      _mm256_storeu_si256((__m256i *)(act->low + 32 * b), bytes);
      first = _mm256_srai_epi16(_mm256_sub_epi16(low, first), 8);
      second = _mm256_srai_epi16(_mm256_sub_epi16(high, second), 8);
      bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xd8);
      _mm256_storeu_si256((__m256i *)(act->q8 + 32 * b), bytes);
    } else {
      _mm256_storeu_si256((__m256i *)(act->q16 + 32 * b), _mm256_shuffle_epi8(low, order));
      _mm256_storeu_si256((__m256i *)(act->q16 + 32 * b + 16), _mm256_shuffle_epi8(high, order));
    }
    act->scale[b] = scale;
    act->whole[b] = (int32_t)((uint32_t)sum[0] + (uint32_t)sum[1]);
    act->sum[b] = scale * (float)act->whole[b];
    act->half[2 * b] = scale * (float)sum[0];
    act->half[2 * b + 1] = scale * (float)sum[1];
  }
}

// ---------------------------------------------------------------- matmul

// Codes of group g of a block: TILE rows x 4 columns, as unsigned bytes or, if `is_signed`, as signed ones.
INLINE Ints codes(int kind, const uint8_t *c, int g) {
  if (kind == Q8_0) return load_ints(c + 4 * TILE * g);
  if (kind == Q2_0) return and_ints(V(srli_epi16)(load_ints(c + 4 * TILE * (g / 4)), 2 * (g % 4)), V(set1_epi8)(3));
  Ints v = load_ints(c + 4 * TILE * (g & 3));
  v = and_ints(g < 4 ? v : V(srli_epi16)(v, 4), V(set1_epi8)(15));
  if (is_signed(kind)) return V(shuffle_epi8)(table_bytes(VALUES), v);
  if (kind == Q5_K || kind == Q5_0) {
    Ints high = load_ints(c + 16 * TILE);
    high = g < 4 ? V(slli_epi16)(high, 4 - g) : V(srli_epi16)(high, g - 4);
    v = or_ints(v, and_ints(high, V(set1_epi8)(16)));
  }
  if (kind == Q6_K) {
    Ints high = load_ints(c + 4 * TILE * (4 + g / 4));
    int i = g % 4;
    high = i < 2 ? V(slli_epi16)(high, 4 - 2 * i) : V(srli_epi16)(high, 2 * i - 4);
    v = or_ints(v, and_ints(high, V(set1_epi8)(48)));
  }
  return v;
}

INLINE Ints broadcast4(const void *p) {
  int32_t v;
  memcpy(&v, p, 4);
  return V(set1_epi32)(v);
}

// Integer sums of groups g0 to g1 - 1 of block b for R rows: what one scale of the weights multiplies.
#if HAS_DOT
INLINE void block_sums(int kind, int mode, int R, const uint8_t *c, int b, int g0, int g1, const Act *act, Ints *sum) {
  Ints low[GROUP];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sum[r] = low[r] = zero_ints();
#pragma GCC unroll 8
  for (int g = g0; g < g1; g++) {
    Ints w = codes(kind, c, g);
    if (is_signed(kind) && !SIGNED_DOT) w = xor_ints(w, V(set1_epi8)((char)0x80));  // code + 128, unsigned
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      sum[r] = DOT_BYTES(sum[r], w, broadcast4(act[r].q8 + 32 * b + 4 * g));
      if (mode == INT16) low[r] = DOT_BYTES(low[r], w, broadcast4(act[r].low + 32 * b + 4 * g));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    if (mode == INT16) sum[r] = V(add_epi32)(V(slli_epi32)(sum[r], 8), low[r]);
    if (is_signed(kind) && !SIGNED_DOT) sum[r] = V(sub_epi32)(sum[r], V(set1_epi32)(128 * act[r].whole[b]));
  }
}
#else
INLINE void block_sums(int kind, int mode, int R, const uint8_t *c, int b, int g0, int g1, const Act *act, __m256i *sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  // How many sums of two products fit into 16 bits: 8 x 2 x 15 x 127, 4 x 2 x 31 x 127, 2 x 2 x 63 x 127 < 32768.
  const int fit = is_signed(kind) ? 1 : kind == Q4_K || kind == Q4_0 || kind == Q2_0 ? 8 : kind == Q6_K ? 2 : 4;
  __m256i part[4];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int g = g0; g < g1; g++) {
    __m256i w = codes(kind, c, g), even, odd;
    if (mode == INT16 && is_signed(kind)) {
      even = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
      odd = _mm256_srai_epi16(w, 8);
    } else if (mode == INT16) {
      even = _mm256_and_si256(w, _mm256_set1_epi16(255));
      odd = _mm256_srli_epi16(w, 8);
    }
    int i = g - g0;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      if (mode == INT16) {
        const int16_t *a = act[r].q16 + 32 * b + 4 * g;
        sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(even, broadcast4(a)));
        sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(odd, broadcast4(a + 2)));
        IN_ORDER(sum[r]);
        continue;
      }
      __m256i a = broadcast4(act[r].q8 + 32 * b + 4 * g);
      if (is_signed(kind)) a = _mm256_sign_epi8(a, w);
      __m256i x = _mm256_maddubs_epi16(is_signed(kind) ? _mm256_abs_epi8(w) : w, a);
      part[r] = i % fit ? _mm256_add_epi16(part[r], x) : x;
      IN_ORDER(part[r]);
      if (i % fit == fit - 1) sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(part[r], ones));
    }
  }
}
#endif

static __attribute__((noinline)) void store_part(const Matrix *m, int t, const float *tile, float *out) {
  for (int n = TILE * t; n < m->rows; n++) out[n] = tile[n - TILE * t] + (m->bias ? m->bias[n] : 0);
}

INLINE void store_tile(const Matrix *m, int t, Floats acc, float *out) {
  if (TILE * t + TILE <= m->rows) {
    if (m->bias) acc = V(add_ps)(acc, V(loadu_ps)(m->bias + TILE * t));
    V(storeu_ps)(out + TILE * t, acc);
    return;
  }
  float tile[TILE];
  V(storeu_ps)(tile, acc);
  store_part(m, t, tile, out);
}

// One tile of outputs for R rows.
INLINE void quantised_tile(int kind, int mode, int R, const Matrix *m, const Layout *l, int t, const Act *act, float *out, size_t stride) {
  const uint8_t *c = m->data + (size_t)t * l->blocks * code_bytes(kind), *s = m->data + l->scales + (size_t)t * l->blocks * 2 * TILE;
  const uint8_t *super = m->data + l->super + (size_t)t * l->supers * 4 * TILE;
  Floats acc[GROUP], d = V(setzero_ps)(), dmin = V(setzero_ps)();
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r] = V(setzero_ps)();
  for (int b = 0; b < l->blocks; b++, c += code_bytes(kind), s += 2 * TILE) {
    for (int line = 0; line < code_bytes(kind); line += 64) _mm_prefetch((const char *)c + 4096 + line, _MM_HINT_T0);
    Floats scale[2], minimum[2];
    if (!has_super(kind)) {
      scale[0] = tile_halves(s);
      minimum[0] = V(mul_ps)(scale[0], V(set1_ps)(offset_of(kind)));
    } else {
      if (!(b & 7)) {
        d = tile_halves(super);
        dmin = tile_halves(super + 2 * TILE);
        super += 4 * TILE;
      }
      if (kind == Q6_K) {
        for (int i = 0; i < 2; i++) {
          scale[i] = V(mul_ps)(d, tile_signed_bytes(s + TILE * i));
          minimum[i] = V(mul_ps)(scale[i], V(set1_ps)(32));
        }
      } else if (kind == IQ4_XS) {
        scale[0] = V(mul_ps)(d, tile_signed_bytes(s));
      } else {
        scale[0] = V(mul_ps)(d, tile_bytes(s));
        minimum[0] = V(mul_ps)(dmin, tile_bytes(s + TILE));
      }
    }
    const int parts = kind == Q6_K ? 2 : 1;  // a scale belongs to 32 columns, or to 16
#pragma GCC unroll 2
    for (int p = 0; p < parts; p++) {
      Ints sum[GROUP];
      block_sums(kind, mode, R, c, b, p * 8 / parts, (p + 1) * 8 / parts, act, sum);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        acc[r] = V(fmadd_ps)(V(cvtepi32_ps)(sum[r]), V(mul_ps)(scale[p], V(set1_ps)(act[r].scale[b])), acc[r]);
        if (!is_signed(kind)) {
          float z = kind == Q6_K ? act[r].half[2 * b + p] : act[r].sum[b];
          acc[r] = V(fnmadd_ps)(minimum[p], V(set1_ps)(z), acc[r]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) store_tile(m, t, acc[r], out + (size_t)r * stride);
}

INLINE void float_tile(int kind, int R, const Matrix *m, int t, const Act *act, float *out, size_t stride) {
  const int size = kind == F32 ? 4 : 2;
  const uint8_t *w = m->data + (size_t)t * TILE * m->columns * size;
  Floats even[GROUP], odd[GROUP];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) even[r] = odd[r] = V(setzero_ps)();
  for (int k = 0; k < m->columns; k += 2, w += 2 * TILE * size) {
    const uint8_t *next = w + TILE * size;
    Floats a = kind == F32 ? V(loadu_ps)((const float *)w) : kind == F16 ? tile_halves(w) : tile_bfloats(w);
    Floats b = kind == F32 ? V(loadu_ps)((const float *)next) : kind == F16 ? tile_halves(next) : tile_bfloats(next);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      even[r] = V(fmadd_ps)(a, V(set1_ps)(act[r].x[k]), even[r]);
      odd[r] = V(fmadd_ps)(b, V(set1_ps)(act[r].x[k + 1]), odd[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) store_tile(m, t, V(add_ps)(even[r], odd[r]), out + (size_t)r * stride);
}

INLINE void tile(int kind, int mode, int R, const Matrix *m, const Layout *l, int t, const Act *act, float *out, size_t stride) {
  if (is_float(kind)) float_tile(kind, R, m, t, act, out, stride);
  else quantised_tile(kind, mode, R, m, l, t, act, out, stride);
}

// Rows are taken GROUP at a time; a row's arithmetic is the same whatever R is.
INLINE void tiles(int kind, int mode, const Matrix *m, int t0, int t1, const Act *act, int rows, float *out, size_t stride) {
  const Layout l = layout_of(kind, m->rows, m->columns);
  for (int t = t0; t < t1; t++) {
    int r = 0;
    for (; r + GROUP <= rows; r += GROUP) tile(kind, mode, GROUP, m, &l, t, act + r, out + (size_t)r * stride, stride);
    for (; r + 4 <= rows; r += 4) tile(kind, mode, 4, m, &l, t, act + r, out + (size_t)r * stride, stride);
    if (rows - r == 3) tile(kind, mode, 3, m, &l, t, act + r, out + (size_t)r * stride, stride);
    else if (rows - r == 2) tile(kind, mode, 2, m, &l, t, act + r, out + (size_t)r * stride, stride);
    else if (rows - r == 1) tile(kind, mode, 1, m, &l, t, act + r, out + (size_t)r * stride, stride);
  }
}

typedef void Kernel(const Matrix *m, int t0, int t1, const Act *act, int rows, float *out, size_t stride);

#define KERNEL(KIND, MODE)                                                                                       \
  static __attribute__((noinline)) void KIND##_##MODE(const Matrix *m, int t0, int t1, const Act *act, int rows, \
                                                      float *out, size_t stride) {                               \
    tiles(KIND, MODE, m, t0, t1, act, rows, out, stride);                                                        \
  }
#define BOTH(KIND) KERNEL(KIND, INT8) KERNEL(KIND, INT16)
BOTH(Q8_0) BOTH(Q4_K) BOTH(Q5_K) BOTH(Q6_K) BOTH(Q5_0) BOTH(Q4_0) BOTH(IQ4_NL) BOTH(IQ4_XS) BOTH(Q2_0)
KERNEL(F16, INT16) KERNEL(BF16, INT16) KERNEL(F32, INT16)

static Kernel *const KERNELS[KINDS][2] = {
    [Q8_0] = {Q8_0_INT8, Q8_0_INT16}, [Q4_K] = {Q4_K_INT8, Q4_K_INT16}, [Q5_K] = {Q5_K_INT8, Q5_K_INT16},
    [Q6_K] = {Q6_K_INT8, Q6_K_INT16}, [Q5_0] = {Q5_0_INT8, Q5_0_INT16}, [Q4_0] = {Q4_0_INT8, Q4_0_INT16},
    [IQ4_NL] = {IQ4_NL_INT8, IQ4_NL_INT16}, [IQ4_XS] = {IQ4_XS_INT8, IQ4_XS_INT16},
    [Q2_0] = {Q2_0_INT8, Q2_0_INT16},
    [F16] = {F16_INT16, F16_INT16},   [BF16] = {BF16_INT16, BF16_INT16}, [F32] = {F32_INT16, F32_INT16},
};

void multiply(const Matrix *m, int mode, int t0, int t1, const Act *act, int rows, float *out, size_t stride) {
  KERNELS[m->kind][mode](m, t0, t1, act, rows, out, stride);
}

typedef struct { const Matrix *m; int mode, rows; const float *x; float *out; uint8_t *memory; Act act[MAX_ROWS]; } Product;

static void product(void *arg, Worker *worker) {
  Product *p = arg;
  int columns = p->m->columns;
  size_t size = act_bytes(columns);
  for (int r; (r = claim(worker, 1, p->rows)) < p->rows;) {
    const float *x = p->x + (size_t)r * columns;
    if (p->m->rotation) {
      float *rotated = (float *)(p->memory + MAX_ROWS * size) + (size_t)r * columns;
      rotate_row(p->m->rotation, x, rotated, columns);
      x = rotated;
    }
    p->act[r] = act_at(p->memory + (size_t)r * size, columns);
    quantise(x, &p->act[r], columns, p->mode);
  }
  barrier(worker);
  int tiles = tiles_of(p->m), part = tiles / (8 * pool_threads(worker->pool)) + 1;
  for (int t; (t = claim(worker, part, tiles)) < tiles;)
    multiply(p->m, p->mode, t, t + part < tiles ? t + part : tiles, p->act, p->rows, p->out, (size_t)p->m->rows);
}

size_t tf_matmul_scratch(int columns) { return MAX_ROWS * (act_bytes(columns) + 4 * (size_t)columns); }

// out [rows, N] = x [rows, K] times the matrix [N, K], transposed.
void tf_matmul(Pool *pool, const Matrix *m, int mode, const float *x, int rows, float *out, uint8_t *scratch) {
  for (int done = 0; done < rows; done += MAX_ROWS) {
    Product p = {.m = m, .mode = mode, .rows = rows - done < MAX_ROWS ? rows - done : MAX_ROWS, .memory = scratch};
    p.x = x + (size_t)done * m->columns;
    p.out = out + (size_t)done * m->rows;
    pool_run(pool, product, &p);
  }
}
