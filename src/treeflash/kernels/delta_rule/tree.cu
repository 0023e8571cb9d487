// The gated delta rule of a tree's rows, with the commit of the path before them (reference.py specifies it).
//
// No headers: NVRTC builds this file, after pdl.cu, with no include path. Macros, given by cuda.py:
//   ROWS     rows of the tree it is compiled for, a multiple of 8; a row's result does not depend on it
//   OVERLAP  1: programmatic dependent launch (PDL), sm_90 and up
//
// A block owns 64 columns of one value head's state. A lane holds 32 dims of one column in registers, in the
// order in which mma.m16n8k8 reads its second operand: of each 16 dims those from 4 * (lane & 3) on. They are
// advanced over the path token by token, so that a state does not depend on how the text was split into steps.
// Then the tree's keys and queries, stacked, are multiplied with the state and the keys on tensor cores, three TF32
// mma for float32's accuracy. The unit-triangular system is solved by substitution, a column a thread. Loads go past
// L1, which may hold older values: with PDL this kernel starts before its inputs are written.

constexpr int D = 128;
constexpr int COLUMNS = 64;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TILES = ROWS / 8;  // of 8 keys; as many of 16 rows in keys and queries together
constexpr int PATH_STEP = WARPS; // tokens of the path in shared memory at a time
// Strides in floats that keep the lanes of one access in different banks.
constexpr int KEY_STRIDE = D + 16;
constexpr int SUM_STRIDE = COLUMNS + 8;
constexpr int PAIR_STRIDE = ROWS + 4;

// Rounded by its bits; the conversion instruction compiles to five, for infinities.
DEVICE u32 to_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
DEVICE void mma(float* c, const u32* a, const u32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// x = large + small, each to TF32's precision.
DEVICE void split(float x, u32& large, u32& small) {
  large = to_tf32(x);
  small = __float_as_uint(x - __uint_as_float(large));
}

// Dot products over 16 dims, two steps of 8; sums [step][large x large, large x small, small x large].
DEVICE void multiply(float (*sums)[3][4], float4 upper, float4 lower, const u32* large, const u32* small) {
  const float a[8] = {upper.x, lower.x, upper.y, lower.y, upper.z, lower.z, upper.w, lower.w};
  u32 a_large[8], a_small[8];
  UNROLL for (int i = 0; i < 8; i++) split(a[i], a_large[i], a_small[i]);
  UNROLL for (int h = 0; h < 2; h++) {
    mma(sums[h][0], a_large + 4 * h, large + 2 * h);
    mma(sums[h][1], a_large + 4 * h, small + 2 * h);
    mma(sums[h][2], a_small + 4 * h, large + 2 * h);
  }
}
DEVICE float total_of(float (*sums)[3][4], int i) {
  return (sums[0][0][i] + sums[1][0][i]) + ((sums[0][1][i] + sums[1][1][i]) + (sums[0][2][i] + sums[1][2][i]));
}

// A warp's token of the path, from number `start` on.
struct PathToken {
  float4 key;
  float2 value;
  float gate, strength;
};
DEVICE PathToken fetch(const float* k, const float* v, const float* g, const float* beta, long long first, int start,
                       int taken, int key_head, int key_heads, int head, int value_heads, int first_column) {
  const int lane = threadIdx.x & 31, number = start + (threadIdx.x >> 5);
  PathToken token = {};
  if (number < taken) {
    const long long at = first + number, of_head = at * value_heads + head;
    token.key = __ldcg((const float4*)(k + (at * key_heads + key_head) * D) + lane);
    token.value = __ldcg((const float2*)(v + of_head * D + first_column) + lane);
    token.gate = __ldcg(g + of_head);
    token.strength = __ldcg(beta + of_head);
  }
  return token;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tree_delta(
    float* q, float* k, float* v, float* g, float* beta, float* state, const long long* slots,
    const long long* count, const long long* ancestors, float* out, int rows, int path, int key_heads,
    int value_heads) {
  extern __shared__ float4 memory[];
  float* keys = (float*)memory;                        // [2 * ROWS]: keys, then queries
  float* sums = keys + 2 * ROWS * KEY_STRIDE;          // [2 * ROWS]: their dot products with the state; then the writes
  float* pairs = sums + 2 * ROWS * SUM_STRIDE;         // [2 * ROWS]: of keys with keys, of queries with keys
  float* path_keys = pairs + 2 * ROWS * PAIR_STRIDE;   // [PATH_STEP, D]
  float* path_values = path_keys + PATH_STEP * D;      // [PATH_STEP, COLUMNS]
  float* path_decay = path_values + PATH_STEP * COLUMNS;
  float* path_strength = path_decay + PATH_STEP;
  float* gate = path_strength + PATH_STEP;
  float* strength = gate + ROWS;
  float* total = strength + ROWS;
  float* grown = total + ROWS;
  u64* seen = (u64*)(grown + ROWS);

  launch_dependents();
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int group = lane >> 2, part = lane & 3;
  const int item = blockIdx.y / value_heads, head = blockIdx.y % value_heads, key_head = head % key_heads;
  const int first_column = blockIdx.x * COLUMNS;
  const long long first = (long long)item * (path + rows);

  // The state was last written in an earlier step: no need to wait for the previous kernel.
  float* band = state + (slots[item] * value_heads + head) * D * D + first_column + warp * 8 + group;
  float held[32];
  UNROLL for (int i = 0; i < 32; i++) held[i] = __ldcg(band + (16 * (i >> 2) + 4 * part + (i & 3)) * D);
  const int taken = (int)count[item];
  const int column = thread & (COLUMNS - 1), quarter = thread / COLUMNS;
  wait_for_inputs();

  float4 loaded[ROWS / 4];
  UNROLL for (int n = 0; n < ROWS / 4; n++) {
    const int row = n * WARPS + warp, own = row < ROWS ? row : row - ROWS;
    loaded[n] = make_float4(0, 0, 0, 0);
    if (own < rows) {
      const float* from = row < ROWS ? k + ((first + path + own) * key_heads + key_head) * D
                                     : q + (((long long)item * rows + own) * key_heads + key_head) * D;
      loaded[n] = __ldcg((const float4*)from + lane);
    }
  }
  float value[ROWS / 4];
  UNROLL for (int n = 0; n < ROWS / 4; n++) {
    const int row = 4 * n + quarter;
    const float* from = v + ((first + path + row) * value_heads + head) * D + first_column + column;
    value[n] = row < rows ? __ldcg(from) : 0.f;
  }
  if (thread < ROWS) {
    const bool live = thread < rows;
    const long long at = (first + path + thread) * value_heads + head;
    gate[thread] = live ? __ldcg(g + at) : 0.f;
    strength[thread] = live ? __ldcg(beta + at) : 0.f;
    seen[thread] = live ? (u64)ancestors[(long long)item * rows + thread] : 0;
  }
  PathToken ahead = fetch(k, v, g, beta, first, 0, taken, key_head, key_heads, head, value_heads, first_column);
  UNROLL for (int n = 0; n < ROWS / 4; n++)
    ((float4*)(keys + (n * WARPS + warp) * KEY_STRIDE))[lane] = loaded[n];

  for (int start = 0; start < taken; start += PATH_STEP) {
    const int here = min(PATH_STEP, taken - start);
    if (start) __syncthreads();  // the previous tokens are done
    ((float4*)(path_keys + warp * D))[lane] = ahead.key;
    ((float2*)(path_values + warp * COLUMNS))[lane] = ahead.value;
    if (lane == 0) {
      path_decay[warp] = expf(ahead.gate);
      path_strength[warp] = ahead.strength;
    }
    __syncthreads();
    ahead = fetch(k, v, g, beta, first, start + PATH_STEP, taken, key_head, key_heads, head, value_heads,
                  first_column);
    for (int token = 0; token < here; token++) {
      float4 key[8];
      float stored[4] = {0, 0, 0, 0};
      UNROLL for (int i = 0; i < 8; i++) {
        key[i] = ((const float4*)(path_keys + token * D))[4 * i + part];
        stored[0] = fmaf(key[i].x, held[4 * i], stored[0]);
        stored[1] = fmaf(key[i].y, held[4 * i + 1], stored[1]);
        stored[2] = fmaf(key[i].z, held[4 * i + 2], stored[2]);
        stored[3] = fmaf(key[i].w, held[4 * i + 3], stored[3]);
      }
      float sum = (stored[0] + stored[1]) + (stored[2] + stored[3]);
      sum += across(sum, 1);
      sum += across(sum, 2);
      const float decay = path_decay[token];
      const float write =
          path_strength[token] * (path_values[token * COLUMNS + warp * 8 + group] - decay * sum);
      UNROLL for (int i = 0; i < 8; i++) {
        held[4 * i] = fmaf(key[i].x, write, decay * held[4 * i]);
        held[4 * i + 1] = fmaf(key[i].y, write, decay * held[4 * i + 1]);
        held[4 * i + 2] = fmaf(key[i].z, write, decay * held[4 * i + 2]);
        held[4 * i + 3] = fmaf(key[i].w, write, decay * held[4 * i + 3]);
      }
    }
  }
  if (taken > 0)
    UNROLL for (int i = 0; i < 32; i++) band[(16 * (i >> 2) + 4 * part + (i & 3)) * D] = held[i];
  __syncthreads();

  if (thread < ROWS) {
    float sum = 0;
    for (int j = 0; j <= thread; j++) sum += (seen[thread] >> j) & 1 ? gate[j] : 0.f;
    total[thread] = sum;
    grown[thread] = expf(sum);
  }
  u32 large[32], small[32];
  UNROLL for (int i = 0; i < 32; i++) split(held[i], large[i], small[i]);
  _Pragma("unroll 1") for (int tile = 0; tile < TILES; tile++) {
    float found[2][3][4] = {};
    const float* upper = keys + (16 * tile + group) * KEY_STRIDE;
    UNROLL for (int i = 0; i < 8; i++)
      multiply(found, ((const float4*)upper)[4 * i + part], ((const float4*)(upper + 8 * KEY_STRIDE))[4 * i + part],
               large + 4 * i, small + 4 * i);
    float* to = sums + (16 * tile + group) * SUM_STRIDE + warp * 8 + 2 * part;
    *(float2*)to = make_float2(total_of(found, 0), total_of(found, 1));
    *(float2*)(to + 8 * SUM_STRIDE) = make_float2(total_of(found, 2), total_of(found, 3));
  }
  __syncthreads();  // total

  _Pragma("unroll 1") for (int job = warp; job < TILES * TILES; job += WARPS) {
    const int tile = job / TILES, other = job % TILES;
    const int last = 16 * tile + 15, furthest = last < ROWS ? last : 16 * tile < ROWS ? ROWS - 1 : last - ROWS;
    if (furthest < 8 * other) continue;  // no row of the tile sees these keys
    float found[2][3][4] = {};
    const float* upper = keys + (16 * tile + group) * KEY_STRIDE;
    const float* right = keys + (8 * other + group) * KEY_STRIDE;
    UNROLL for (int i = 0; i < 8; i++) {
      const float4 key = ((const float4*)right)[4 * i + part];
      u32 b_large[4], b_small[4];
      split(key.x, b_large[0], b_small[0]);
      split(key.y, b_large[1], b_small[1]);
      split(key.z, b_large[2], b_small[2]);
      split(key.w, b_large[3], b_small[3]);
      multiply(found, ((const float4*)upper)[4 * i + part], ((const float4*)(upper + 8 * KEY_STRIDE))[4 * i + part],
               b_large, b_small);
    }
    UNROLL for (int i = 0; i < 4; i++) {
      const int row = 16 * tile + group + 8 * (i >> 1), key = 8 * other + 2 * part + (i & 1);
      const int own = row < ROWS ? row : row - ROWS;
      // As a difference: its terms alone would overflow.
      float pair = (seen[own] >> key) & 1 ? total_of(found, i) * expf(total[own] - total[key]) : 0.f;
      if (row < ROWS) pair = key < own ? pair * strength[own] : 0.f;
      pairs[row * PAIR_STRIDE + key] = pair;
    }
  }
  UNROLL for (int n = 0; n < ROWS / 4; n++) {
    const int row = 4 * n + quarter;
    float* at = sums + row * SUM_STRIDE + column;
    *at = strength[row] * (value[n] - grown[row] * *at);
  }
  __syncthreads();

  if (thread < COLUMNS) {
    float write[ROWS];
    UNROLL for (int i = 0; i < ROWS; i++) {
      float sum[4] = {0, 0, 0, 0};
      UNROLL for (int j = 0; j < i; j += 4) {
        const float4 pair = *(const float4*)(pairs + i * PAIR_STRIDE + j);
        sum[0] = fmaf(pair.x, write[j], sum[0]);
        if (j + 1 < i) sum[1] = fmaf(pair.y, write[j + 1], sum[1]);
        if (j + 2 < i) sum[2] = fmaf(pair.z, write[j + 2], sum[2]);
        if (j + 3 < i) sum[3] = fmaf(pair.w, write[j + 3], sum[3]);
      }
      write[i] = sums[i * SUM_STRIDE + column] - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
      sums[i * SUM_STRIDE + column] = write[i];
    }
  }
  __syncthreads();

  float write[ROWS];
  UNROLL for (int i = 0; i < ROWS; i++) write[i] = sums[i * SUM_STRIDE + column];
  UNROLL for (int n = 0; n < ROWS / 4; n++) {
    const int row = 4 * n + quarter;
    float sum[4] = {0, 0, 0, 0};
    UNROLL for (int j = 0; j <= 4 * n; j += 4) {
      const float4 pair = *(const float4*)(pairs + (ROWS + row) * PAIR_STRIDE + j);
      sum[0] = fmaf(pair.x, write[j], sum[0]);
      sum[1] = fmaf(pair.y, write[j + 1], sum[1]);
      sum[2] = fmaf(pair.z, write[j + 2], sum[2]);
      sum[3] = fmaf(pair.w, write[j + 3], sum[3]);
    }
    if (row < rows)
      out[(((long long)item * rows + row) * value_heads + head) * D + first_column + column] =
          fmaf(grown[row], sums[(ROWS + row) * SUM_STRIDE + column], (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}
