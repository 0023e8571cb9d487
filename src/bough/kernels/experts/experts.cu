// Matmuls of rows with the matrices of the experts they chose, a stack of tiles for each expert (quant_matmul/layout.py).
//
// No headers; after runtime/pdl.cu and quant_matmul/weights.cu, whose macros apply. Also, given by cuda.py:
//   BLOCK_TILES 16-row tiles of a block of matrix rows, one warp each      TOKENS  pairs of a chunk, at most
//   STAGES      of the ring in shared memory                              RESIDENT  blocks that an SM holds
//
// A pair is a row and one of its experts. The routing has sorted the pairs by expert and cut them into chunks of at most
// TOKENS pairs of one expert. An item is one block of matrix rows for one chunk; the items are dealt out evenly and
// contiguously to the CTAs, so that chunks of one expert, whose weights are then in L2, are neighbours. How many there are
// is read from memory: the grid has the same size for any routing. A CTA sums all columns of an item in one order, and a
// column of the mma belongs to one pair: a pair's result depends neither on the others nor on TOKENS nor on the grid, nor on
// where its expert's weights are.

DEVICE void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory"); }

constexpr int COPIERS = 4 * TOKENS;           // threads that copy 32 columns of a chunk's x, 16 bytes each
constexpr int X_GROUPS = THREADS / COPIERS;   // groups of 32 columns copied at a time
static_assert(THREADS % COPIERS == 0 && GROUPS % X_GROUPS == 0, "a thread always copies for the same pair");

// What the end of an item needs, written when its first copy is started.
struct Item {
  int expert, block, count;
  int pair[TOKENS];
  float scale[TOKENS];
};

// y [pairs, rows]: pair p times its expert's matrix. w and cold: tiles [places][depth][expert_tiles]; row_scale by expert;
// x: float16, row r at r * row_stride bytes, 32 columns at group_stride bytes, times x_scale [r]; pair p reads row p / each.
// chunks: expert, first place in `order`, pairs, place of the weights: p of w, or ~p of cold, which may be host memory.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
experts(const u8* __restrict__ w, const u8* __restrict__ cold, const float* __restrict__ row_scale, const u8* __restrict__ x,
        const float* __restrict__ x_scale, float* __restrict__ y, const int4* __restrict__ chunks, const int* __restrict__ count,
        const int* __restrict__ order, int blocks, int depth, int rows, int expert_tiles, int each, long long group_stride,
        long long row_stride) {
  extern __shared__ __align__(128) u8 ring[];
  __shared__ Item items[STAGES];  // no more items than stages are in flight
  const u32 ring0 = shared_address(ring);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  launch_dependents();
  wait_for_inputs();
  // Loads of what the previous kernels wrote go past L1, which may hold older values.
  const int total = __ldcg(count) * blocks, ctas = total < (int)gridDim.x ? total : (int)gridDim.x;
  if ((int)blockIdx.x >= ctas) return;
  const int first = (long long)blockIdx.x * total / ctas, end = (long long)(blockIdx.x + 1) * total / ctas;
  const int units = (end - first) * depth;
  // The next copy.
  int fill_unit = 0, fill_slot = 0, fill_item = first, fill_step = 0, fill_place = 0;
  const int mine = threadIdx.x / 4 % TOKENS, quarter = threadIdx.x % 4;
  const u8 *weights_from = w, *x_from = nullptr;
  auto begin_item = [&]() {
    const int4 chunk = __ldcg(chunks + fill_item / blocks);
    const int block = fill_item % blocks;
    const int place = chunk.w < 0 ? ~chunk.w : chunk.w;
    weights_from = (chunk.w < 0 ? cold : w) + ((size_t)place * depth * expert_tiles + block * BLOCK_TILES) * TILE_BYTES;
    Item& item = items[fill_place];
    if (threadIdx.x == 0) item.expert = chunk.x, item.block = block, item.count = chunk.z;
    x_from = nullptr;
    if (mine < chunk.z) {
      const int pair = __ldcg(order + chunk.y + mine), row = pair / each;
      x_from = x + row * row_stride + (threadIdx.x / COPIERS) * group_stride + quarter * 16;
      if (threadIdx.x < COPIERS && quarter == 0) item.pair[mine] = pair, item.scale[mine] = __ldcg(x_scale + row);
    }
  };
  auto fill = [&]() {
    if (fill_unit < units) {
      if (fill_step == 0) begin_item();
      const u32 to = ring0 + fill_slot * STAGE_BYTES;
      const u8* from = weights_from + (size_t)fill_step * expert_tiles * TILE_BYTES;
      for (int o = threadIdx.x * 16; o < WEIGHT_BYTES; o += THREADS * 16) copy16(to + o, from + o);
      if (x_from)
        UNROLL for (int g = 0; g < GROUPS; g += X_GROUPS)
          copy16(to + WEIGHT_BYTES + g * (COPIERS * 16) + threadIdx.x * 16, x_from + (fill_step * GROUPS + g) * group_stride);
      fill_unit++;
      if (++fill_slot == STAGES) fill_slot = 0;
      if (++fill_step == depth) {
        fill_step = 0, fill_item++;
        if (++fill_place == STAGES) fill_place = 0;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int i = 0; i < STAGES - 1; i++) fill();
  const Constants c = constants(lane);
  float sums[TILES][4];
  auto clear = [&]() { UNROLL for (int f = 0; f < TILES; f++) UNROLL for (int e = 0; e < 4; e++) sums[f][e] = 0.f; };
  clear();
  int slot = 0, step = 0, place = 0;
  auto finish = [&]() {
    const Item& item = items[place];
    const int row0 = item.block * BLOCK_ROWS + warp * 16 + (lane >> 2);
    const float* scales = row_scale + (size_t)item.expert * expert_tiles * 16 + row0;
    UNROLL for (int r = 0; r < 2; r++) {
      const int row = row0 + 8 * r;
      const float scale = __ldg(scales + 8 * r);
      UNROLL for (int n = 0; n < TILES; n++)
        UNROLL for (int e = 0; e < 2; e++) {
          const int token = n * 8 + 2 * (lane & 3) + e;
          if (token < item.count && row < rows) y[(size_t)item.pair[token] * rows + row] = sums[n][2 * r + e] * scale * item.scale[token];
        }
    }
  };
  for (int i = 0; i < units; i++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    fill();
    const u32 stage = ring0 + slot * STAGE_BYTES;
    multiply(sums, stage + warp * TILE_BYTES, stage + WEIGHT_BYTES, lane, c, []() {});
    if (++slot == STAGES) slot = 0;
    if (++step < depth) continue;
    finish();
    clear();
    step = 0;
    if (++place == STAGES) place = 0;
  }
}
