// The gated delta rule of a tree's rows, with the commit of the path before them (reference.py specifies it).
//
// No headers: NVRTC builds this file, after pdl.cu, with no include path. Macros, given by cuda.py:
//   D        dims of a head: 16, or a multiple of 32
//   OVERLAP  1: programmatic dependent launch (PDL), sm_90 and up
//
// A warp owns 8 columns of one value head's state and holds them in registers: a lane has two columns, of each
// 8 * WIDTH dims WIDTH from WIDTH * part on. It goes over the path token by token and then over the tree's rows in the
// order of visits, depth first: a row reads its parent's state, and a row that has children advances it, by the functions
// that commit a path. So a row's bits follow from its path alone: not from the tree around it, the number of rows or how
// the text was cut into steps. For the same reason every operation whose rounding matters is spelled out (fmaf,
// __fmul_rn, __fadd_rn): the compiler contracts nothing else. A state that is needed again after a subtree is saved in
// shared memory, where each thread reads only what it wrote.
//
// A block owns 8 columns a warp of the value heads that share one key head, side by side. Its last warp copies the
// rows of k, q and v into a ring of STAGES stages in the order of use, two stages ahead, and prepares what the columns
// share: exp(g) and q k. Copies and loads go past L1, which may hold older values: with PDL this kernel starts before its
// inputs are written.

constexpr int COLUMNS = 8;  // of a warp, two a lane
constexpr int PARTS = 8;    // lanes that share a column
constexpr int DIMS = D / PARTS;
constexpr int WIDTH = D % 32 ? 2 : 4;  // floats in one load of a row
constexpr int STAGE = 8;               // rows
constexpr int STAGES = 3;
constexpr int MOST_WARPS = 8;  // with columns
constexpr int SLOT = 2 * D + MOST_WARPS * (COLUMNS + 4);  // floats of a row: k, q, values, records

// A visit, as tree_order packs it; levels count from 1, 0: none.
DEVICE int row_of(int visit) { return visit & 255; }
DEVICE int saved_level(int visit) { return (visit >> 8) & 15; }
DEVICE int restored_level(int visit) { return (visit >> 12) & 15; }
DEVICE bool has_children(int visit) { return visit >> 16; }
constexpr int CHILDREN = 1 << 16;

struct Tree {
  const float *q, *k, *v, *g, *beta;
  const int* order;              // of the sequence: its visits
  long long first_row, joined;   // of the sequence: among tree rows, among path and tree rows together
  int taken, total, path;        // rows of the path to advance over; with those of the tree; room for a path
  int key_head, key_heads, value_heads;
  int first_unit, units;         // of 8 columns: the block's first; of all value heads of the key head
  DEVICE int head(int unit) const { return key_head + unit / (D / COLUMNS) * key_heads; }
  DEVICE int column(int unit) const { return unit % (D / COLUMNS) * COLUMNS; }
};

DEVICE void copy(float* to, const float* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

// What a lane of the last warp carries of a stage that is being copied: the visit of item lane % 8, and gate and
// strength of items lane / 8 and lane / 8 + 4 for the columns of warp lane % 8.
struct Ahead {
  int visit;
  float gate[2], strength[2];
};

DEVICE int visit_of(const Tree& tree, int stage) {
  const int n = stage * STAGE + (threadIdx.x & 7);
  return n < tree.taken ? n | CHILDREN : n < tree.total ? tree.order[n - tree.taken] : 0;
}

// Begins the copies of a stage.
DEVICE Ahead fetch(const Tree& tree, float* ring, int stage, int warps, int visit) {
  const int lane = threadIdx.x & 31, start = stage * STAGE;
  float* slots = ring + stage % STAGES * STAGE * SLOT;
  Ahead ahead = {visit};
  UNROLL for (int e = lane; e < STAGE * D / 4; e += 32) {
    const int item = e / (D / 4), piece = e % (D / 4) * 4, n = start + item;
    const int row = row_of(__shfl_sync(0xffffffffu, ahead.visit, item));
    if (n < tree.total) {
      const bool in_tree = n >= tree.taken;
      const long long at = tree.joined + (in_tree ? tree.path + row : n);
      copy(slots + item * SLOT + piece, tree.k + (at * tree.key_heads + tree.key_head) * D + piece);
      if (in_tree)
        copy(slots + item * SLOT + D + piece,
             tree.q + ((tree.first_row + row) * tree.key_heads + tree.key_head) * D + piece);
    }
  }
  UNROLL for (int i = 0; i < 4; i++) {
    const int item = 2 * i + (lane >> 4), warp = (lane >> 1) & 7, piece = (lane & 1) * 4, n = start + item;
    const int row = row_of(__shfl_sync(0xffffffffu, ahead.visit, item)), unit = tree.first_unit + warp;
    if (n < tree.total && warp < warps && unit < tree.units) {
      const long long at = tree.joined + (n >= tree.taken ? tree.path + row : n);
      copy(slots + item * SLOT + 2 * D + warp * COLUMNS + piece,
           tree.v + (at * tree.value_heads + tree.head(unit)) * D + tree.column(unit) + piece);
    }
  }
  UNROLL for (int i = 0; i < 2; i++) {
    const int item = 4 * i + (lane >> 3), warp = lane & 7, n = start + item;
    const int row = row_of(__shfl_sync(0xffffffffu, ahead.visit, item)), unit = tree.first_unit + warp;
    if (n < tree.total && warp < warps && unit < tree.units) {
      const long long at = tree.joined + (n >= tree.taken ? tree.path + row : n);
      ahead.gate[i] = __ldcg(tree.g + at * tree.value_heads + tree.head(unit));
      ahead.strength[i] = __ldcg(tree.beta + at * tree.value_heads + tree.head(unit));
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  return ahead;
}

// Waits for the copies of a stage, all but the newest group, and adds the records (decay, strength, q k, visit).
DEVICE void prepare(const Tree& tree, float* ring, int stage, const Ahead& ahead) {
  const int lane = threadIdx.x & 31, start = stage * STAGE;
  float* slots = ring + stage % STAGES * STAGE * SLOT;
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
  float product[2] = {0, 0};
  UNROLL for (int item = 0; item < STAGE; item++) {
    if (start + item < tree.taken || start + item >= tree.total) continue;
    const float* k = slots + item * SLOT;
    float sum = 0;
    UNROLL for (int dim = lane; dim < D; dim += 32) sum = fmaf(k[D + dim], k[dim], sum);
    UNROLL for (int mask = 16; mask; mask >>= 1) sum = __fadd_rn(sum, across(sum, mask));
    if ((lane >> 3) == (item & 3)) product[item >> 2] = sum;
  }
  UNROLL for (int i = 0; i < 2; i++) {
    const int item = 4 * i + (lane >> 3), warp = lane & 7;
    const int visit = __shfl_sync(0xffffffffu, ahead.visit, item);
    float4* records = (float4*)(slots + item * SLOT + 2 * D + MOST_WARPS * COLUMNS);
    records[warp] = make_float4(expf(ahead.gate[i]), ahead.strength[i], product[i], __int_as_float(visit));
  }
}

DEVICE void load_dims(float* x, const float* row) {
  const int part = (threadIdx.x >> 2) & 7;
  UNROLL for (int i = 0; i < DIMS; i += WIDTH) {
    const float* from = row + i * PARTS + part * WIDTH;
    if (WIDTH == 4) {
      const float4 y = *(const float4*)from;
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    } else {
      const float2 y = *(const float2*)from;
      x[i] = y.x, x[i + 1] = y.y;
    }
  }
}

// x S over the lane's dims, in order, for its two columns.
DEVICE float2 dot(const float* x, const float (*held)[2]) {
  float2 sum = make_float2(0, 0);
  UNROLL for (int i = 0; i < DIMS; i++) {
    sum.x = fmaf(x[i], held[i][0], sum.x);
    sum.y = fmaf(x[i], held[i][1], sum.y);
  }
  return sum;
}

// The sum over the lanes that share a column, for the lane's own one of its two columns.
DEVICE float sum_of(float2 part) {
  const bool high = threadIdx.x & 16;
  float sum = __fadd_rn(high ? part.y : part.x, across(high ? part.x : part.y, 16));
  sum = __fadd_rn(sum, across(sum, 8));
  return __fadd_rn(sum, across(sum, 4));
}

// What a token writes into the lane's own column: beta (v - exp(g) k S).
DEVICE float write_of(float decay, float strength, float value, float stored) {
  return __fmul_rn(strength, fmaf(-decay, stored, value));
}

// S <- exp(g) S + k^T u.
DEVICE void advance(float (*held)[2], const float* key, float decay, float write) {
  const bool high = threadIdx.x & 16;
  const float other = across(write, 16), writes[2] = {high ? other : write, high ? write : other};
  UNROLL for (int i = 0; i < DIMS; i++) {
    held[i][0] = fmaf(key[i], writes[0], __fmul_rn(decay, held[i][0]));
    held[i][1] = fmaf(key[i], writes[1], __fmul_rn(decay, held[i][1]));
  }
}

// One thread's part of a saved state.
DEVICE float4* saved_at(float* saved, int level) {
  const int threads = blockDim.x - 32;
  return (float4*)saved + (level - 1) * (DIMS / 2) * threads + threadIdx.x;
}

extern "C" __global__ void __launch_bounds__(32 * (MOST_WARPS + 1), 1) tree_delta(
    const float* q, const float* k, const float* v, const float* g, const float* beta, float* state,
    const long long* slots, const long long* count, const int* order, const long long* first, float* out, int rows,
    int path, int key_heads, int value_heads) {
  extern __shared__ float4 memory[];
  float* ring = (float*)memory;                  // [STAGES, STAGE, SLOT]
  float* saved = ring + STAGES * STAGE * SLOT;   // [levels, DIMS / 2, threads] float4

  launch_dependents();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x >> 5) - 1;
  const int item = blockIdx.y / key_heads;
  const long long first_row = first ? first[item] : (long long)item * rows;
  if (first) rows = (int)(first[item + 1] - first_row);
  const int taken = (int)count[item], total = taken + rows, stages = (total + STAGE - 1) / STAGE;
  const Tree tree = {q, k, v, g, beta, order + first_row, first_row, (long long)item * path + first_row,
                     taken, total, path, (int)(blockIdx.y % key_heads), key_heads, value_heads,
                     (int)blockIdx.x * warps, value_heads / key_heads * (D / COLUMNS)};
  if (warp == warps) {
    // The order of visits was written at the start of the step.
    const int visits[2] = {visit_of(tree, 0), visit_of(tree, 1)};
    wait_for_inputs();
    Ahead next = fetch(tree, ring, 0, warps, visits[0]), later = fetch(tree, ring, 1, warps, visits[1]);
    prepare(tree, ring, 0, next);
    for (int stage = 0; stage < stages; stage++) {
      __syncthreads();
      next = later;
      later = fetch(tree, ring, stage + 2, warps, visit_of(tree, stage + 2));
      prepare(tree, ring, stage + 1, next);
    }
    return;
  }

  const int unit = tree.first_unit + warp, part = (lane >> 2) & 7, group = lane & 3, high = lane >> 4;
  const bool live = unit < tree.units && total > 0;
  const int head = tree.head(unit), column = tree.column(unit) + 2 * group;
  float* band = state + (slots[item] * value_heads + head) * D * D + column;
  float held[DIMS][2];
  // The state was last written in an earlier step: no need to wait for the previous kernel.
  UNROLL for (int i = 0; i < DIMS; i++) {
    const int dim = i / WIDTH * WIDTH * PARTS + part * WIDTH + i % WIDTH;
    const float2 x = live ? __ldcg((const float2*)(band + dim * D)) : make_float2(0, 0);
    held[i][0] = x.x, held[i][1] = x.y;
  }
  wait_for_inputs();

  const float* values = ring + 2 * D + warp * COLUMNS + 2 * group + high;
  const float4* records = (const float4*)(ring + 2 * D + MOST_WARPS * COLUMNS) + warp;
  int n = 0, slot = 0;
  for (; n < taken; n++, slot = slot + 1 == STAGES * STAGE ? 0 : slot + 1) {
    if (n % STAGE == 0) __syncthreads();
    float key[DIMS];
    load_dims(key, ring + slot * SLOT);
    const float4 record = records[slot * SLOT / 4];
    const float write = write_of(record.x, record.y, values[slot * SLOT], sum_of(dot(key, held)));
    advance(held, key, record.x, write);
  }
  if (taken > 0 && live)
    UNROLL for (int i = 0; i < DIMS; i++) {
      const int dim = i / WIDTH * WIDTH * PARTS + part * WIDTH + i % WIDTH;
      *(float2*)(band + dim * D) = make_float2(held[i][0], held[i][1]);
    }
  float* to = out + (first_row * value_heads + head) * D + column + high;
  float query[DIMS];
  if (n % STAGE) load_dims(query, ring + slot * SLOT + D);
  for (; n < total; n++, slot = slot + 1 == STAGES * STAGE ? 0 : slot + 1) {
    if (n % STAGE == 0) {
      __syncthreads();
      load_dims(query, ring + slot * SLOT + D);
    }
    const float4 record = records[slot * SLOT / 4];
    const int visit = __float_as_int(record.w);
    if (restored_level(visit)) {
      const float4* from = saved_at(saved, restored_level(visit));
      UNROLL for (int i = 0; i < DIMS / 2; i++) {
        const float4 x = from[i * (blockDim.x - 32)];
        held[2 * i][0] = x.x, held[2 * i][1] = x.y, held[2 * i + 1][0] = x.z, held[2 * i + 1][1] = x.w;
      }
    }
    float key[DIMS];
    load_dims(key, ring + slot * SLOT);
    const float2 read = dot(query, held), stored = dot(key, held);
    // The next row's, to be here when its parent's state is.
    if ((n + 1) % STAGE) load_dims(query, ring + (slot + 1) * SLOT + D);
    const float write = write_of(record.x, record.y, values[slot * SLOT], sum_of(stored));
    // q S of the row's own state, from its parent's: exp(g) q S + (q k) u.
    const float result = fmaf(record.x, sum_of(read), __fmul_rn(record.z, write));
    if (live && (lane & 12) == 0) to[(long long)row_of(visit) * value_heads * D] = result;
    if (saved_level(visit)) {
      float4* into = saved_at(saved, saved_level(visit));
      UNROLL for (int i = 0; i < DIMS / 2; i++)
        into[i * (blockDim.x - 32)] =
            make_float4(held[2 * i][0], held[2 * i][1], held[2 * i + 1][0], held[2 * i + 1][1]);
    }
    if (has_children(visit)) advance(held, key, record.x, write);
  }
}
