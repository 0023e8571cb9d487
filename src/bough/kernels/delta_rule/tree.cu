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

constexpr int PARTS = 8;                   // lanes that share a column
constexpr int OWN = 2;                     // columns of a lane; with four it is no faster
constexpr int COLUMNS = OWN * 32 / PARTS;  // of a warp
constexpr int DIMS = D / PARTS;
constexpr int WIDTH = D % 32 ? 2 : 4;      // floats in one load of a row
constexpr int STAGE = 8;                   // rows
constexpr int STAGES = 3;
constexpr int MOST_COLUMNS = 64;           // of a block
constexpr int MOST_WARPS = MOST_COLUMNS / COLUMNS;
constexpr int THREADS = 32 * (MOST_WARPS + 1);  // at most
constexpr int SLOT = 2 * D + MOST_COLUMNS + 4 * MOST_WARPS;  // floats of a row: k, q, values, records

// A visit, as tree_order packs it; levels count from 1, 0: none.
DEVICE int row_of(int visit) { return visit & 255; }
DEVICE int saved_level(int visit) { return (visit >> 8) & 15; }
DEVICE int restored_level(int visit) { return (visit >> 12) & 15; }
DEVICE bool has_children(int visit) { return visit >> 16; }
constexpr int CHILDREN = 1 << 16;

// A sequence's rows, for one key head.
struct Tree {
  const float *q, *k, *v, *g, *beta;
  int taken, total, path;               // rows of the path to advance over; with those of the tree; room for a path
  int key_stride, value_stride, heads;  // floats between rows of k, of v, of g
  int units, key_heads, key_head;       // units of COLUMNS columns of all value heads that share the key head
  DEVICE int head(int unit) const { return key_head + unit / (D / COLUMNS) * key_heads; }
  DEVICE int column(int unit) const { return unit % (D / COLUMNS) * COLUMNS; }
  // Where number n of the path and the tree is among k, v, g and beta.
  DEVICE int at(int n, int visit) const { return n < taken ? n : path + row_of(visit); }
};

// Begins to copy four floats, or to write zeros: without a branch, so that many are in flight.
DEVICE void copy(float* to, const float* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(wanted ? 16 : 0)
               : "memory");
}

// What a lane of the last warp carries of a stage that is being copied: the visit of item lane % 8, and gate and
// strength of item lane / 4 for the columns of warps lane % 4, lane % 4 + 4, ...
struct Ahead {
  int visit;
  float gate[MOST_WARPS / 4], strength[MOST_WARPS / 4];
};

// Begins the copies of a stage; visits: those of rows lane and lane + 32 of the tree.
DEVICE Ahead fetch(const Tree& tree, const int* visits, float* ring, int stage, int first_unit, int warps) {
  const int lane = threadIdx.x & 31, start = stage * STAGE, own = start + (lane & 7) - tree.taken;
  float* slots = ring + stage % STAGES * STAGE * SLOT;
  const int low = __shfl_sync(0xffffffffu, visits[0], own & 31), high = __shfl_sync(0xffffffffu, visits[1], own & 31);
  Ahead ahead = {own < 0 ? CHILDREN : own < 32 ? low : high};
  UNROLL for (int e = 0; e < STAGE * D / 4; e += 32) {
    const int item = (e + lane) / (D / 4), piece = (e + lane) % (D / 4) * 4, n = start + item;
    const int visit = __shfl_sync(0xffffffffu, ahead.visit, item);
    float* to = slots + item * SLOT + piece;
    const bool used = n < tree.total, in_tree = used && n >= tree.taken;
    copy(to, tree.k + (used ? tree.at(n, visit) : 0) * tree.key_stride + piece, used);
    copy(to + D, tree.q + (in_tree ? row_of(visit) : 0) * tree.key_stride + piece, in_tree);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    const int item = 2 * i + (lane >> 4), column = (lane & 15) * 4, warp = column / COLUMNS, unit = first_unit + warp;
    const int visit = __shfl_sync(0xffffffffu, ahead.visit, item), n = start + item;
    const bool used = n < tree.total && warp < warps && unit < tree.units;
    const int at = used ? tree.at(n, visit) * tree.value_stride + tree.head(unit) * D + tree.column(unit) : 0;
    copy(slots + item * SLOT + 2 * D + column, tree.v + at + column % COLUMNS, used);
  }
  const int item = lane >> 2, n = start + item, visit = __shfl_sync(0xffffffffu, ahead.visit, item);
  UNROLL for (int i = 0; i < MOST_WARPS / 4; i++) {
    const int warp = (lane & 3) + 4 * i, unit = first_unit + warp;
    if (n < tree.total && warp < warps && unit < tree.units) {
      const int at = tree.at(n, visit) * tree.heads + tree.head(unit);
      ahead.gate[i] = __ldcg(tree.g + at);
      ahead.strength[i] = __ldcg(tree.beta + at);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  return ahead;
}

// Waits for the copies of a stage, all but the newest group, and adds the records (decay, strength, q k, visit).
DEVICE void prepare(float* ring, int stage, const Ahead& ahead) {
  const int lane = threadIdx.x & 31;
  float* slots = ring + stage % STAGES * STAGE * SLOT;
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
  float sums[STAGE];
  UNROLL for (int item = 0; item < STAGE; item++) {
    sums[item] = 0;
    UNROLL for (int dim = 4 * lane; dim < D; dim += 128) {
      const float4 k = *(const float4*)(slots + item * SLOT + dim), q = *(const float4*)(slots + item * SLOT + D + dim);
      sums[item] = fmaf(q.x, k.x, sums[item]);
      sums[item] = fmaf(q.y, k.y, sums[item]);
      sums[item] = fmaf(q.z, k.z, sums[item]);
      sums[item] = fmaf(q.w, k.w, sums[item]);
    }
  }
  // Over the lanes; a lane ends with the sum of item lane / 4.
  UNROLL for (int half = 4; half; half >>= 1) {
    const bool upper = lane & (4 * half);
    UNROLL for (int i = 0; i < half; i++)
      sums[i] = __fadd_rn(upper ? sums[i + half] : sums[i], across(upper ? sums[i] : sums[i + half], 4 * half));
  }
  sums[0] = __fadd_rn(sums[0], across(sums[0], 2));
  sums[0] = __fadd_rn(sums[0], across(sums[0], 1));
  const int item = lane >> 2, visit = __shfl_sync(0xffffffffu, ahead.visit, item);
  float4* records = (float4*)(slots + item * SLOT + 2 * D + MOST_COLUMNS);
  UNROLL for (int i = 0; i < MOST_WARPS / 4; i++)
    records[(lane & 3) + 4 * i] =
        make_float4(expf(ahead.gate[i]), ahead.strength[i], sums[0], __int_as_float(visit));
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

// The lane's columns of one vector.
struct Own {
  float x[OWN];
};
DEVICE Own load_own(const float* from) {
  Own y;
  UNROLL for (int c = 0; c < OWN; c += 2) *(float2*)(y.x + c) = *(const float2*)(from + c);
  return y;
}

// x S over the lane's dims, for its columns: the even dims in order, the odd ones, and their sum.
DEVICE Own dot(const float* x, const float (*held)[OWN]) {
  Own even = {}, odd = {};
  UNROLL for (int i = 0; i < DIMS; i += 2)
    UNROLL for (int c = 0; c < OWN; c++) {
      even.x[c] = fmaf(x[i], held[i][c], even.x[c]);
      odd.x[c] = fmaf(x[i + 1], held[i + 1][c], odd.x[c]);
    }
  UNROLL for (int c = 0; c < OWN; c++) even.x[c] = __fadd_rn(even.x[c], odd.x[c]);
  return even;
}

// One step of the sum over the lanes that share a column.
DEVICE Own with_lane(Own part, int mask) {
  UNROLL for (int c = 0; c < OWN; c++) part.x[c] = __fadd_rn(part.x[c], across(part.x[c], mask));
  return part;
}

// The same; of the first `count` columns half remain, those of the lane's bit.
DEVICE void halve(Own& part, int mask, int count) {
  const bool upper = threadIdx.x & mask;
  UNROLL for (int c = 0; c < count / 2; c++)
    part.x[c] = __fadd_rn(upper ? part.x[c + count / 2] : part.x[c],
                          across(upper ? part.x[c] : part.x[c + count / 2], mask));
}

// What a token writes into the lane's columns: beta (v - exp(g) k S).
DEVICE Own write_of(float4 record, Own value, Own stored) {
  UNROLL for (int c = 0; c < OWN; c++)
    value.x[c] = __fmul_rn(record.y, fmaf(-record.x, stored.x[c], value.x[c]));
  return value;
}

// S <- exp(g) S + k^T u.
DEVICE void advance(float (*held)[OWN], const float* key, float decay, Own write) {
  UNROLL for (int i = 0; i < DIMS; i++)
    UNROLL for (int c = 0; c < OWN; c++) held[i][c] = fmaf(key[i], write.x[c], __fmul_rn(decay, held[i][c]));
}

// Restores the state of a visit's parent, or saves it. Each thread reads only what it wrote.
DEVICE void keep(float (*held)[OWN], float* saved, int visit) {
  const int threads = blockDim.x - 32, level = restored_level(visit) + saved_level(visit);
  float4* at = (float4*)saved + (level - 1) * (DIMS * OWN / 4) * threads + threadIdx.x;
  float* x = held[0];
  UNROLL for (int i = 0; i < DIMS * OWN / 4; i++) {
    if (restored_level(visit)) {
      const float4 y = at[i * threads];
      x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
    } else {
      at[i * threads] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tree_delta(
    const float* q, const float* k, const float* v, const float* g, const float* beta, float* state,
    const long long* slots, const long long* count, const int* order, const long long* first, float* out, int rows,
    int path, int key_heads, int value_heads) {
  extern __shared__ float4 memory[];
  float* ring = (float*)memory;                       // [STAGES, STAGE, SLOT]
  float* saved = ring + STAGES * STAGE * SLOT;  // [levels, DIMS * OWN / 4, threads] float4

  launch_dependents();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x >> 5) - 1;
  const int item = blockIdx.y / key_heads, key_head = blockIdx.y % key_heads, first_unit = blockIdx.x * warps;
  const long long first_row = first ? first[item] : (long long)item * rows, joined = (long long)item * path + first_row;
  if (first) rows = (int)(first[item + 1] - first_row);
  const int taken = (int)count[item], total = taken + rows, value_stride = value_heads * D;
  if (!total) return;
  const Tree tree = {q + (first_row * key_heads + key_head) * D, k + (joined * key_heads + key_head) * D,
                     v + joined * value_stride, g + joined * value_heads, beta + joined * value_heads,
                     taken, total, path, key_heads * D, value_stride, value_heads,
                     value_heads / key_heads * (D / COLUMNS), key_heads, key_head};
  if (warp == warps) {
    // The order of visits was written at the start of the step: no need to wait for the previous kernel.
    const int visits[2] = {lane < rows ? order[first_row + lane] : 0, lane + 32 < rows ? order[first_row + lane + 32] : 0};
    wait_for_inputs();
    Ahead next = fetch(tree, visits, ring, 0, first_unit, warps), later = fetch(tree, visits, ring, 1, first_unit, warps);
    prepare(ring, 0, next);
    for (int stage = 0; stage * STAGE < total; stage++) {
      __syncthreads();
      next = later;
      later = fetch(tree, visits, ring, stage + 2, first_unit, warps);
      prepare(ring, stage + 1, next);
    }
    return;
  }

  const int unit = first_unit + warp, part = lane >> 2, group = lane & 3;
  const bool live = unit < tree.units && total > 0;
  // Of a lane's columns it writes the output of one, as its lanes with the same columns do of the others.
  const int head = tree.head(unit), column = tree.column(unit) + OWN * group, chosen = part / (PARTS / OWN);
  float* band = state + (slots[item] * value_heads + head) * D * D + column;
  float held[DIMS][OWN];
  // The state was last written in an earlier step.
  UNROLL for (int i = 0; i < DIMS; i++) {
    const int dim = i / WIDTH * WIDTH * PARTS + part * WIDTH + i % WIDTH;
    UNROLL for (int c = 0; c < OWN; c += 2) {
      const float2 x = live ? __ldcg((const float2*)(band + dim * D + c)) : make_float2(0, 0);
      held[i][c] = x.x, held[i][c + 1] = x.y;
    }
  }
  wait_for_inputs();

  const int value_at = 2 * D + warp * COLUMNS + OWN * group, record_at = 2 * D + MOST_COLUMNS + 4 * warp;
  float* to = out + first_row * value_stride + head * D + column + chosen;
  const bool writes = live && part % (PARTS / OWN) == 0;
  for (int n = 0; n < total;) {
    __syncthreads();
    const float* row = ring + n / STAGE % STAGES * STAGE * SLOT;
    const int end = min(n + STAGE, total);
    float key[DIMS];
    if (n < taken) {
      for (; n < min(end, taken); n++, row += SLOT) {
        load_dims(key, row);
        const float4 record = *(const float4*)(row + record_at);
        const Own value = load_own(row + value_at), stored = with_lane(with_lane(with_lane(dot(key, held), 16), 8), 4);
        advance(held, key, record.x, write_of(record, value, stored));
      }
      if (n == taken && live)
        UNROLL for (int i = 0; i < DIMS; i++) {
          const int dim = i / WIDTH * WIDTH * PARTS + part * WIDTH + i % WIDTH;
          UNROLL for (int c = 0; c < OWN; c += 2)
            *(float2*)(band + dim * D + c) = make_float2(held[i][c], held[i][c + 1]);
        }
      if (n == end) continue;
    }
    // A row is loaded while the one before it is summed over the lanes; the last of a stage once more.
    float query[DIMS];
    load_dims(query, row + D);
    load_dims(key, row);
    float4 record = *(const float4*)(row + record_at);
    Own value = load_own(row + value_at);
    int visit = __float_as_int(record.w);
    for (; n < end; n++) {
      if (__builtin_expect(saved_level(visit) + restored_level(visit) > 0, 0)) keep(held, saved, visit);
      Own read = dot(query, held);
      Own stored = dot(key, held);
      if (n + 1 < end) row += SLOT;
      load_dims(query, row + D);
      const int next = __float_as_int(row[record_at + 3]);
      UNROLL for (int step = 0, mask = 16; mask >= 4; step++, mask >>= 1) {
        stored = with_lane(stored, mask);
        if (OWN >> step > 1)
          halve(read, mask, OWN >> step);
        else
          read.x[0] = __fadd_rn(read.x[0], across(read.x[0], mask));
      }
      const Own write = write_of(record, value, stored);
      float own = write.x[0];
      UNROLL for (int c = 1; c < OWN; c++) own = chosen == c ? write.x[c] : own;
      // q S of the row's own state, from its parent's: exp(g) q S + (q k) u.
      const float result = fmaf(record.x, read.x[0], __fmul_rn(record.z, own));
      if (has_children(visit)) advance(held, key, record.x, write);
      load_dims(key, row);
      record = *(const float4*)(row + record_at);
      value = load_own(row + value_at);
      float* target = to + row_of(visit) * value_stride;
      if (writes) *target = result;
      visit = next;
    }
  }
}
