// Rows that a matmul reads next, packed as quant_matmul/rows.py describes: the norm of a sum, silu of a gate times
// another row, the norm of heads times silu of a gate (reference.py specifies them).
//
// No headers: NVRTC builds this file, after pdl.cu, with no include path. Macros, given by cuda.py:
//   KIND     0 norm of x + y, 1 silu(x) * y, 2 norm of the heads of x times silu(y)
//   WIDTH    columns of a row, a multiple of 4       HEAD     dims of a head, for KIND 2
//   CLUSTER  blocks of a row                         THREADS  of a block
//   OVERLAP  1: programmatic dependent launch (PDL), and blocks of a row are a cluster: sm_90 and up
//
// These kernels are bound by latency, so all loads of a thread are in flight at once, values stay in registers, and
// one reduction gives a row's sum of squares and its largest magnitude: the norm's factor of a whole row goes into
// the row's scale. The next kernel, a matmul, is launched at once: it fills its ring with weights meanwhile. Loads of
// activations go past L1, which may hold older values: with PDL this kernel starts before they are written. Split-K
// partial sums of a matmul (quant_matmul/partial_sums.py) are reduced here.

constexpr int PADDED = (WIDTH + 255) / 256 * 256;
constexpr int SHARE = PADDED / 4 / CLUSTER;  // groups of four columns of a block
constexpr int ITEMS = (SHARE + THREADS - 1) / THREADS;
constexpr int WARPS = THREADS / 32;
// Partial sums that are fetched at once, 0: the operand never has any. The 27B's matrices have no more on Hopper; where one
// block has a whole row, registers hold fewer.
constexpr int X_AHEAD = KIND != 1 ? 0 : ITEMS <= 4 ? 2 : 1;
constexpr int Y_AHEAD = KIND == 2 ? 0 : KIND == 0 && ITEMS <= 2 ? 9 : ITEMS <= 4 ? 2 : 1;
static_assert(WIDTH % 4 == 0 && THREADS % 32 == 0 && PADDED % (4 * CLUSTER) == 0, "groups of four columns");
#if KIND == 2
static_assert(HEAD <= 128 && (HEAD & (HEAD - 1)) == 0 && SHARE % (HEAD / 4) == 0, "a head is in one warp");
#endif

DEVICE float4 load(const float* p) { return __ldcg((const float4*)p); }
DEVICE float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
DEVICE float largest(float4 v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }
DEVICE float squares(float4 v) { return fmaf(v.x, v.x, v.y * v.y) + fmaf(v.z, v.z, v.w * v.w); }
DEVICE u32 to_half2(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// As one access, which the compiler does not generate by itself.
DEVICE void store(unsigned short* to, u32 first, u32 second) {
  asm volatile("st.global.v2.u32 [%0],{%1,%2};" ::"l"(to), "r"(first), "r"(second) : "memory");
}

// Rows [.., stride] of floats. With partial sums, `at` holds the columns that one CTA computed alone and `parts`
// [CTAs][2][slot / block rows][block] the others.
struct Operand {
  const float* at;
  long long stride;
  const float* parts;  // null: no partial sums
  int depth, share, extra, first, slot, block;
};
// The CTAs with partial sums of the same block of columns.
struct Owners {
  int begin, end;
};
DEVICE int cta_of(int unit, const Operand& from) {
  const int cut = from.extra * (from.share + 1);
  return unit < cut ? unit / (from.share + 1) : from.extra + (unit - cut) / from.share;
}
DEVICE Owners owners_of(const Operand& from, int k) {
  if (!from.parts) return Owners{0, 0};
  const int unit = (from.first + k) / from.block * from.depth;
  return Owners{cta_of(unit, from), cta_of(unit + from.depth - 1, from)};
}
DEVICE const float* part(const Operand& from, int row, int k, int cta, int segment) {
  return from.parts + (long long)(2 * cta + segment) * from.slot + row * from.block + ((from.first + k) & (from.block - 1));
}
DEVICE float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
// Four columns of a row: the first AHEAD partial sums in flight at once; `sum` adds them and the remaining ones, in order.
template <int AHEAD>
struct Coming {
  static constexpr int COUNT = AHEAD > 1 ? AHEAD : 1;
  Owners of;
  float4 v[COUNT];
  DEVICE void find(const Operand& from, int k) {
    if (AHEAD) of = owners_of(from, k);
  }
  DEVICE void fetch(const Operand& from, int row, int k) {
    v[0] = load(!AHEAD || of.begin == of.end ? from.at + row * from.stride + k : part(from, row, k, of.begin, 1));
    UNROLL for (int j = 1; j < COUNT; j++)
      v[j] = of.begin + j <= of.end ? load(part(from, row, k, of.begin + j, 0)) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  DEVICE float4 sum(const Operand& from, int row, int k) const {
    float4 total = v[0];
    UNROLL for (int j = 1; j < COUNT; j++) total = plus(total, v[j]);
    if (AHEAD)
      _Pragma("unroll 1") for (int cta = of.begin + COUNT; cta <= of.end; cta++)
        total = plus(total, load(part(from, row, k, cta, 0)));
    return total;
  }
};

// The sum and the largest magnitude of a row.
struct Found {
  float sum, peak;
};
DEVICE Found joined(Found a, Found b) { return Found{a.sum + b.sum, fmaxf(a.peak, b.peak)}; }

#if CLUSTER > 1 && OVERLAP
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
// The exchange between the blocks of a row. Copies that complete on a barrier in shared memory, because a release of the
// cluster's own barrier would wait for all global writes of the thread.
struct Exchange {
  Found of_blocks[CLUSTER];
  unsigned long long arrived;
};
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Signals that this block has started.
DEVICE u32 enter(Exchange& m, const u64*) {
  if (threadIdx.x == 0) {
    const u32 barrier = shared_address(&m.arrived);
    asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(barrier), "r"((u32)sizeof(m.of_blocks)) : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  return 0;
}
// Sends this block's result to all blocks of the row, and waits for theirs.
DEVICE void meet(Exchange& m, Found own, u64*, u32) {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x < CLUSTER) {
    u32 to, barrier;
    asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(to) : "r"(shared_address(m.of_blocks + blockIdx.x)), "r"(threadIdx.x));
    asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(barrier) : "r"(shared_address(&m.arrived)), "r"(threadIdx.x));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0],{%1,%2},[%3];" ::"r"(to), "f"(own.sum), "f"(own.peak), "r"(barrier) : "memory");
  }
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p,[%0],0; @p bra done; bra again; done: }" ::"r"(shared_address(&m.arrived)) : "memory");
}
#elif CLUSTER > 1
#define OF_CLUSTER
// The same through L2: a block writes its two numbers, each with the launch's number in the same eight bytes, to `board`
// [rows][CLUSTER][2], which is zero before the first launch, and waits until those of all blocks have arrived. It never
// waits for a row that has not begun: blocks start in order, so only the last row begun can be incomplete.
struct Exchange {
  Found of_blocks[CLUSTER];
};
DEVICE u64 load_word(const u64* p) {
  u64 word;
  asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(word) : "l"(p) : "memory");
  return word;
}
DEVICE void store_word(u64* p, u32 launch, float value) {
  const u64 word = (u64)launch << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(p), "l"(word) : "memory");
}
DEVICE float wait_for(const u64* p, u32 launch) {
  u64 word = load_word(p);
  while ((u32)(word >> 32) != launch) word = load_word(p);
  return __uint_as_float((u32)word);
}
// The number of this launch: one more than the last that used the row's part of the board.
DEVICE u32 enter(Exchange&, const u64* board) {
  return (u32)(load_word(board + (blockIdx.y * CLUSTER + blockIdx.x) * 2) >> 32) + 1;
}
DEVICE void meet(Exchange& m, Found own, u64* board, u32 launch) {
  u64* row = board + blockIdx.y * CLUSTER * 2;
  if (threadIdx.x == 0) store_word(row + 2 * blockIdx.x, launch, own.sum), store_word(row + 2 * blockIdx.x + 1, launch, own.peak);
  if (threadIdx.x < CLUSTER)
    m.of_blocks[threadIdx.x] = Found{wait_for(row + 2 * threadIdx.x, launch), wait_for(row + 2 * threadIdx.x + 1, launch)};
  __syncthreads();
}
#else
#define OF_CLUSTER
struct Exchange {};
DEVICE u32 enter(Exchange&, const u64*) { return 0; }
#endif

// The result of the whole row, in all its threads; in the same order for any number of rows.
DEVICE Found of_row(Found own, Exchange& exchange, u64* board, u32 launch) {
  __shared__ Found of_warps[WARPS];
  UNROLL for (int mask = 16; mask; mask >>= 1) own = joined(own, Found{across(own.sum, mask), across(own.peak, mask)});
  if ((threadIdx.x & 31) == 0) of_warps[threadIdx.x >> 5] = own;
  __syncthreads();
  Found all = of_warps[0];
  UNROLL for (int warp = 1; warp < WARPS; warp++) all = joined(all, of_warps[warp]);
#if CLUSTER > 1
  meet(exchange, all, board, launch);
  all = exchange.of_blocks[0];
  UNROLL for (int block = 1; block < CLUSTER; block++) all = joined(all, exchange.of_blocks[block]);
#endif
  return all;
}

// x, y: aligned to 16 bytes. KIND 0: without y, x itself is normed and total not written.
// Column k of row m of out is at (k / 32) * group_stride + m * row_stride + k % 32; with a row_stride of 8 in groups of eight
// columns, see quant_matmul/rows.py.
extern "C" __global__ void OF_CLUSTER __launch_bounds__(THREADS, 1)
rows(const Operand x, const Operand y, const float* __restrict__ weight, float* total, unsigned short* out, float* scale,
     long long group_stride, long long row_stride, u64* board, float eps) {
  launch_dependents();
  __shared__ __align__(8) Exchange exchange;
  const u32 launch = enter(exchange, board);
  const int first = blockIdx.x * SHARE, row = blockIdx.y;
  auto column = [&](int item) { return 4 * (first + item * THREADS + (int)threadIdx.x); };
  auto inside = [&](int item) { return item * THREADS + (int)threadIdx.x < SHARE && column(item) < WIDTH; };
  const float4 nothing = make_float4(0.f, 0.f, 0.f, 0.f);
#if KIND == 0
  float4 factor[ITEMS];
  UNROLL for (int i = 0; i < ITEMS; i++) factor[i] = inside(i) ? __ldg((const float4*)(weight + column(i))) : nothing;
#elif KIND == 2
  const float4 factor = __ldg((const float4*)weight + threadIdx.x % (HEAD / 4));
#endif
  Coming<X_AHEAD> of_x[ITEMS];
  Coming<Y_AHEAD> of_y[ITEMS];
  UNROLL for (int i = 0; i < ITEMS; i++) of_x[i].find(x, column(i)), of_y[i].find(y, column(i));
  wait_for_inputs();
  UNROLL for (int i = 0; i < ITEMS; i++) {
    if (inside(i)) of_x[i].fetch(x, row, column(i));
    if (inside(i) && y.at) of_y[i].fetch(y, row, column(i));
  }
  float4 value[ITEMS];
  Found own = {0.f, 0.f};
  UNROLL for (int i = 0; i < ITEMS; i++) {
    float4 v = inside(i) ? of_x[i].sum(x, row, column(i)) : nothing;
    const float4 o = inside(i) && y.at ? of_y[i].sum(y, row, column(i)) : nothing;
#if KIND == 0
    v = plus(v, o);
    if (y.at && inside(i)) *(float4*)(total + row * (long long)WIDTH + column(i)) = v;
    own.sum += squares(v);
    v = make_float4(v.x * factor[i].x, v.y * factor[i].y, v.z * factor[i].z, v.w * factor[i].w);
#elif KIND == 1
    v = make_float4(silu(v.x) * o.x, silu(v.y) * o.y, silu(v.z) * o.z, silu(v.w) * o.w);
#else
    float sum = squares(v);
    UNROLL for (int mask = HEAD / 8; mask; mask >>= 1) sum += across(sum, mask);
    const float times = rsqrtf(sum / HEAD + eps);
    v = make_float4(v.x * times * factor.x * silu(o.x), v.y * times * factor.y * silu(o.y),
                    v.z * times * factor.z * silu(o.z), v.w * times * factor.w * silu(o.w));
#endif
    own.peak = fmaxf(own.peak, largest(v));
    value[i] = v;
  }
  const Found all = of_row(own, exchange, board, launch);
  const float norm = KIND == 0 ? rsqrtf(all.sum / WIDTH + eps) : 1.f;
  // Exponents of float32; a row of zeroes or subnormals keeps the largest factor, an infinity stays one.
  int exponent = (int)((__float_as_uint(all.peak * norm) >> 23) & 255);
  exponent = exponent < 16 ? 16 : exponent > 254 ? 254 : exponent;
  if (first == 0 && threadIdx.x == 0) scale[row] = __uint_as_float((u32)(exponent - 14) << 23);
  const float up = __uint_as_float((u32)(268 - exponent) << 23);
  UNROLL for (int i = 0; i < ITEMS; i++) {
    if (i * THREADS + (int)threadIdx.x >= SHARE) continue;
    const float4 v = value[i];
    const int k = column(i);
    const u32 low = to_half2(v.x * norm * up, v.y * norm * up), high = to_half2(v.z * norm * up, v.w * norm * up);
    unsigned short* to = out + (k >> 5) * group_stride + row * row_stride;
    if (row_stride == 8) {
      u32* pair = (u32*)(to + (k & 4) / 2 * (group_stride / 4) + (k & 31) / 8 * 2);
      pair[0] = low, pair[group_stride / 8] = high;
    } else {
      store(to + (k & 31), low, high);
    }
  }
}
