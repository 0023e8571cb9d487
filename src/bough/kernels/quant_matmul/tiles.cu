// Matmuls of at most 64 rows with a matrix in tiles (layout.py describes their order), and the expansion of tiles.
//
// No headers: NVRTC builds this file, after pdl.cu, with no include path. Macros, all given by cuda.py:
//   LOW, HIGH   bits of a code in the two parts of a tile     SCALES  0 none, 1 six, 2 byte, 3 half, 4 affine
//   OFFSET      subtracted from a code                        TABLE, TABLE0..3  code to value + 128, four to a word
//   UNIT        columns of a stage                            TOKENS  rows of x, a multiple of 8
//   HALVES      stages of a tile: 2 halves, without BULK, or 1
//   BLOCK_TILES 16-row tiles of a CTA: 8, or, without BULK, 16
//   STAGES      of the ring in shared memory                  BULK    1: bulk copies and mbarriers (sm_90 and up)
//   HALFWAY     1: a stage is refilled in the middle of the next unit, when other warps have left it
//
// A code is used as the float16 with the same bits, a subnormal: code * 2^-24, exactly. One fma on two codes
// applies scale and minimum. An upper nibble is 16 times its code; its scale is divided by 16.
// Weights are the 16-row operand of mma.m16n8k16, rows of x the 8-wide one.
//
// Work is cut into units of BLOCK_ROWS rows x the columns of a tile, dealt out evenly and contiguously to the CTAs, whose number
// does not depend on TOKENS: a row's sums are the same in every variant. A block of rows that is split over
// several CTAs (split-K) belongs to the one with its first columns; the others, whose shares begin with it, write
// their partial sums to memory. There a word that still holds UNWRITTEN, a NaN no arithmetic makes, has not
// arrived: one round trip through L2 and no counters. A CTA waits only for CTAs that were started before it. With
// `partial` the reduction is fused into the next kernel (partial_sums.py), which saves that round trip.

#if BULK
DEVICE void barrier_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(b), "r"(n)); }
DEVICE void barrier_wait(u32 b, u32 phase) {
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @p bra done; bra again; done: }" ::"r"(b), "r"(phase) : "memory");
}
DEVICE void barrier_expect(u32 b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(b), "r"(n) : "memory"); }
// Depends on `loaded`: the barrier's release does not wait for outstanding loads (seen on an H200: a stage was refilled
// before its last tiles had been read, once in 10^5 units). `zero` is 0, which the compiler must not see.
DEVICE void barrier_arrive(u32 b, u32 loaded, u32 zero) {
  asm volatile("{.reg .b32 t; and.b32 t,%1,%2; add.u32 t,t,%0; mbarrier.arrive.shared.b64 _,[t];}" ::"r"(b), "r"(loaded), "r"(zero) : "memory");
}
DEVICE void bulk_copy(u32 to, const void* from, u32 n, u32 b, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(to), "l"(from), "r"(n), "r"(b), "l"(policy) : "memory");
}
#else
DEVICE void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory"); }
DEVICE void copy8(u32 to, const void* from) { asm volatile("cp.async.ca.shared.global [%0],[%1],8;" ::"r"(to), "l"(from) : "memory"); }
#endif

// A tile in memory.
constexpr int WHOLE_LOW = HALVES * LOW_BYTES, WHOLE_SCALES_AT = HALVES * SCALE_AT;
constexpr int WHOLE_BYTES = WHOLE_SCALES_AT + (SCALES == 1 ? HALVES * UNIT + 64 : HALVES * SCALE_BYTES);
#if HALVES == 2
// Copies one half of the columns of `tiles` tiles. The scale of a whole tile is in both.
DEVICE void copy_half(u32 to, const u8* from, int half, int tiles) {
  for (int i = threadIdx.x; i < tiles * (LOW_BYTES / 16); i += THREADS) {
    const int tile = i / (LOW_BYTES / 16), o = i % (LOW_BYTES / 16) * 16;
    copy16(to + tile * TILE_BYTES + o, from + tile * WHOLE_BYTES + half * LOW_BYTES + o);
  }
#if HIGH
  for (int i = threadIdx.x; i < tiles * 32; i += THREADS)
    copy8(to + i / 32 * TILE_BYTES + LOW_BYTES + i % 32 * 8, from + i / 32 * WHOLE_BYTES + WHOLE_LOW + i % 32 * 16 + half * 8);
#endif
#if SCALES == 1
  for (int i = threadIdx.x; i < tiles * 16; i += THREADS)
    copy8(to + i / 16 * TILE_BYTES + SCALE_AT + i % 16 * 8, from + i / 16 * WHOLE_BYTES + WHOLE_SCALES_AT + i % 16 * 16 + half * 8);
  for (int i = threadIdx.x; i < tiles * 4; i += THREADS)
    copy16(to + i / 4 * TILE_BYTES + SCALE_AT + UNIT + i % 4 * 16, from + i / 4 * WHOLE_BYTES + WHOLE_SCALES_AT + 2 * UNIT + i % 4 * 16);
#else
  constexpr int PARTS = SCALE_BYTES / UNIT;
  for (int i = threadIdx.x; i < tiles * PARTS * 8; i += THREADS) {
    const int tile = i / (PARTS * 8), part = i / 8 % PARTS, g = i % 8;
    copy16(to + tile * TILE_BYTES + SCALE_AT + part * UNIT + g * 16, from + tile * WHOLE_BYTES + WHOLE_SCALES_AT + part * 2 * UNIT + g * 32 + half * 16);
  }
#endif
}
#endif

// CTA c has share + (c < extra) units, beginning with first_unit(c).
DEVICE int first_unit(int c, int share, int extra) { return c * share + (c < extra ? c : extra); }
DEVICE int cta_of(int unit, int share, int extra) {
  const int cut = extra * (share + 1);
  return unit < cut ? unit / (share + 1) : extra + (unit - cut) / share;
}

constexpr u32 UNWRITTEN = 0xffffdeadu;
DEVICE uint4 load_part(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE void store_part(uint4* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE uint4* part_of(uint4* parts, int cta, int warp, int lane) { return parts + ((size_t)cta * BLOCK_TILES + warp) * (TILES * 32) + lane; }

// Adds the partial sums of CTAs first to last of a block of rows, in this order.
DEVICE void add_parts(float (&sums)[TILES][4], uint4* parts, int first, int last, int warp, int lane) {
  // Loads in flight at a time, as many as registers hold: each iteration is a round trip to L2.
  constexpr int AHEAD = TILES <= 2 ? 8 : TILES <= 4 ? 4 : TILES <= 6 ? 2 : 1;
  for (int base = first; base <= last; base += AHEAD) {
    uint4 v[AHEAD][TILES];
    UNROLL for (int k = 0; k < AHEAD; k++)
      if (base + k <= last) UNROLL for (int f = 0; f < TILES; f++) v[k][f] = load_part(part_of(parts, base + k, warp, lane) + f * 32);
    UNROLL for (int k = 0; k < AHEAD; k++)
      if (base + k <= last) {
        uint4* part = part_of(parts, base + k, warp, lane);
        UNROLL for (int f = 0; f < TILES; f++) {
          uint4 z = v[k][f];
          while (z.x == UNWRITTEN || z.y == UNWRITTEN || z.z == UNWRITTEN || z.w == UNWRITTEN) z = load_part(part + f * 32);
          store_part(part + f * 32, make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN));
          sums[f][0] += __uint_as_float(z.x), sums[f][1] += __uint_as_float(z.y);
          sums[f][2] += __uint_as_float(z.z), sums[f][3] += __uint_as_float(z.w);
        }
      }
  }
}

DEVICE void store(const float (&v)[TILES][4], float* y, const float* x_scale, int row0, int rows, int stride, int tokens, int lane) {
  UNROLL for (int n = 0; n < TILES; n++)
    UNROLL for (int e = 0; e < 4; e++) {
      const int row = row0 + (lane >> 2) + 8 * (e >> 1), token = n * 8 + 2 * (lane & 3) + (e & 1);
      if (token < tokens && row < rows) y[(size_t)token * stride + row] = v[n][e] * x_scale[token];
    }
}

// y [tokens, stride] = x w^T. w: tiles [depth][tiles]; x: float16 [K/32][TOKENS][32], times x_scale [TOKENS];
// parts: BLOCK_ROWS * TOKENS words a CTA, UNWRITTEN before and after. partial: the scaled partial sums of split blocks stay there,
// as [CTA][its first segment, its last][TOKENS][BLOCK_ROWS].
// position: 0 waits for the previous launch. In a group of launches with the same x, each with its own parts, 1 is the first
// and 2 any other: the first launches its dependents when x has arrived; the others wait only before they end.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCK_TILES > 8 ? 1 : 2)
matmul(const u8* __restrict__ w, const float* __restrict__ row_scale, const u8* __restrict__ x, const float* __restrict__ x_scale,
       float* __restrict__ y, uint4* parts, int tiles, int depth, int rows, int stride, int tokens, int share, int extra, int position, int partial) {
  extern __shared__ __align__(128) u8 ring[];
  const u32 ring0 = shared_address(ring);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, cta = gridDim.x - 1 - blockIdx.x;
  // In stages: of this CTA, of a block of rows.
  const int unit0 = HALVES * first_unit(cta, share, extra), units = HALVES * (share + (cta < extra)), steps = HALVES * depth;
  const int block0 = (u32)unit0 / (u32)steps, step0 = unit0 - block0 * steps;
  const int blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
  const size_t step_bytes = (size_t)tiles * WHOLE_BYTES;
  // The next copy.
  int fill_unit = 0, fill_slot = 0, fill_block = block0, fill_step = step0;
  auto advance = [&]() {
    fill_unit++;
    if (++fill_slot == STAGES) fill_slot = 0;
    if (++fill_step == steps) fill_step = 0, fill_block++;
  };
#if BULK
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
  u64 once, often;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(once));
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(often));
  auto fill_weights = [&]() {
    barrier_expect(full + 8 * fill_slot, STAGE_BYTES);
    bulk_copy(ring0 + fill_slot * STAGE_BYTES, w + fill_step * step_bytes + (size_t)fill_block * WEIGHT_BYTES, WEIGHT_BYTES,
              full + 8 * fill_slot, once);
  };
  auto fill_x = [&](int to, int from) {
    bulk_copy(ring0 + to * STAGE_BYTES + WEIGHT_BYTES, x + (size_t)from * X_BYTES, X_BYTES, full + 8 * to, often);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, THREADS);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (position != 1) launch_dependents();
  const int ahead = units < STAGES ? units : STAGES;
  for (int i = 0; i < ahead; i++) {
    if (threadIdx.x == 0) fill_weights();  // they do not depend on the previous kernel, and arrive while it ends
    advance();
  }
  if (position != 2) wait_for_inputs();
  if (position == 1) launch_dependents();
  if (threadIdx.x == 0)
    for (int i = 0, from = step0; i < ahead; i++) {
      fill_x(i, from);
      if (++from == steps) from = 0;
    }
  int empty_phase = 0;
  // The stage of the previous unit is refilled once all warps have left it.
  auto refill = [&](int unit) {
    if (unit && fill_unit < units) {
      if (threadIdx.x == 0) {
        barrier_wait(empty + 8 * fill_slot, empty_phase);
        fill_weights();
        fill_x(fill_slot, fill_step);
      }
      advance();
      if (fill_slot == 0) empty_phase ^= 1;
      __syncwarp();
    }
  };
#else
  auto fill = [&]() {
    if (fill_unit < units) {
      const u32 to = ring0 + fill_slot * STAGE_BYTES;
      const u8* from = w + fill_step / HALVES * step_bytes + (size_t)fill_block * (BLOCK_TILES * WHOLE_BYTES);
      const int left = tiles - fill_block * BLOCK_TILES, copied = left < BLOCK_TILES ? left : BLOCK_TILES;
#if HALVES == 2
      copy_half(to, from, fill_step & 1, copied);
#else
      for (int o = threadIdx.x * 16; o < copied * TILE_BYTES; o += THREADS * 16) copy16(to + o, from + o);
#endif
      from = x + (size_t)fill_step * X_BYTES;
      for (int o = threadIdx.x * 16; o < X_BYTES; o += THREADS * 16) copy16(to + WEIGHT_BYTES + o, from + o);
      advance();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int i = 0; i < STAGES - 1; i++) fill();
#endif
  // Not through L1, which may hold older row scales: with PDL this kernel starts before they are written.
  __shared__ float x_scales[TOKENS];
  if (threadIdx.x < tokens) x_scales[threadIdx.x] = __ldcg(x_scale + threadIdx.x);
  __syncthreads();
  const Constants c = constants(lane);
  float sums[TILES][4];
  UNROLL for (int f = 0; f < TILES; f++) UNROLL for (int e = 0; e < 4; e++) sums[f][e] = 0.f;
  int slot = 0, phase = 0, started = step0, block = block0, step = step0;
  float scales[2];
  auto load_scales = [&]() {
    const float* mine = row_scale + block * BLOCK_ROWS + warp * 16 + (lane >> 2);
    const bool inside = block * BLOCK_TILES + warp < tiles;
    UNROLL for (int r = 0; r < 2; r++) scales[r] = inside ? __ldg(mine + 8 * r) : 0.f;
  };
  auto write = [&](float* to, int first_row, int limit, int pitch) {
    UNROLL for (int f = 0; f < TILES; f++) UNROLL for (int e = 0; e < 4; e++) sums[f][e] *= scales[e >> 1];
    store(sums, to, x_scales, first_row + warp * 16, limit, pitch, tokens, lane);
  };
  auto finish = [&]() { write(y, block * BLOCK_ROWS, rows, stride); };
  auto write_partial = [&](int segment) { write((float*)parts + (size_t)(2 * cta + segment) * (BLOCK_ROWS * TOKENS), 0, BLOCK_ROWS, BLOCK_ROWS); };
  load_scales();
  for (int i = 0; i < units; i++) {
#if BULK
    if (!HALFWAY) refill(i);
    barrier_wait(full + 8 * slot, phase);
    __syncwarp();
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    fill();
#endif
    const u32 stage = ring0 + slot * STAGE_BYTES;
    const u32 last = multiply(sums, stage + warp * TILE_BYTES, stage + WEIGHT_BYTES, lane, c, [&]() {
#if BULK
      if (HALFWAY) refill(i);
#endif
    });
#if BULK
    // Every lane arrives: one lane for its warp is no faster, and no tool could check that the others are converged.
    barrier_arrive(empty + 8 * slot, last, (u32)position >> 4);
#endif
    if (++slot == STAGES) slot = 0, phase ^= 1;
    if (started && (step == steps - 1 || i == units - 1)) {
      if (partial) write_partial(0);
      else UNROLL for (int f = 0; f < TILES; f++) store_part(part_of(parts, cta, warp, lane) + f * 32, *(uint4*)sums[f]);
      if (i == units - 1) step = steps - 1;
    } else if (step == steps - 1) {
      finish();
    }
    if (++step < steps) continue;
    step = started = 0;
    if (++block < blocks) load_scales();
    UNROLL for (int f = 0; f < TILES; f++) UNROLL for (int e = 0; e < 4; e++) sums[f][e] = 0.f;
  }
  if (step && partial) {
    write_partial(1);
  } else if (step) {
    add_parts(sums, parts, cta + 1, cta_of(block * depth + depth - 1, share, extra), warp, lane);
    finish();
  }
  if (position == 2) wait_for_inputs();
}

#if HALVES == 1
// Rows of tiles to float16 [rows, 32 * pitch], each row times factor[row]. One warp a tile.
extern "C" __global__ void __launch_bounds__(256)
expand(const u8* __restrict__ w, const float* __restrict__ factor, uint4* __restrict__ out, int first_tile, int tiles, int all_tiles, int depth) {
  __shared__ __align__(128) u8 buffer[8 * TILE_BYTES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = blockIdx.x * 8 + warp, step = blockIdx.y;
  if (tile >= tiles) return;
  const u8* from = w + ((size_t)step * all_tiles + first_tile + tile) * TILE_BYTES;
  for (int o = lane * 16; o < TILE_BYTES; o += 512) *(uint4*)(buffer + warp * TILE_BYTES + o) = *(const uint4*)(from + o);
  __syncwarp();
  asm volatile("" ::: "memory");
  const u32 at = shared_address(buffer) + warp * TILE_BYTES;
  const Constants c = constants(lane);
  const int g = lane >> 2;
  float scale[2];
  UNROLL for (int r = 0; r < 2; r++) scale[r] = factor[(first_tile + tile) * 16 + g + 8 * r];
  Tile t;
  load_tile(t, at, lane);
  UNROLL for (int j = 0; j < SPANS; j++) {
    uint4 low;
    UNROLL for (int h = 0; h < 2; h++) {
      if (LOW == 8 || (LOW == 4 && h == 0)) low = load_low(at, j, h, lane);
      u32 a[8];
      weights(a, t, at, low, j, h, lane, c);
      UNROLL for (int r = 0; r < 2; r++) {
        uint4 v;
        UNROLL for (int i = 0; i < 4; i++)
          asm("{.reg .b16 l,h; .reg .f32 a,b; mov.b32 {l,h},%1; cvt.f32.f16 a,l; cvt.f32.f16 b,h; mul.f32 a,a,%2; mul.f32 b,b,%2; cvt.rn.f16x2.f32 %0,b,a;}"
              : "=r"((&v.x)[i]) : "r"(a[2 * i + r]), "f"(scale[r]));
        const size_t row = tile * 16 + g + 8 * r;
        out[(row * depth + step) * (UNIT / 8) + (2 * j + h) * 4 + (lane & 3)] = v;
      }
    }
  }
}
#endif
