// Rows that a product reads next, packed as quant_matmul/rows.py says: the norm of a sum, silu of a gate times
// another row, the norm of heads times silu of a gate (reference.py says what these are).
//
// No headers: NVRTC builds this file with no include path. Macros, given by cuda.py:
//   KIND     0 norm of x + y, 1 silu(x) * y, 2 norm of the heads of x times silu(y)
//   WIDTH    columns of a row, a multiple of 4       HEAD     dims of a head, for KIND 2
//   CLUSTER  blocks of a row (more than one: sm_90)  THREADS  of a block
//   OVERLAP  1: launched before the kernel in front of it has ended (sm_90 and up)
//
// Everything here waits for something, so all loads of a thread are on their way at once, values stay in registers,
// and a row is summed and searched for its largest magnitude together: the factor that a norm puts on a whole row
// goes into the row's scale. The next kernel, a product, may start at once: it fills its ring with weights meanwhile.
// Loads of what the step computed go past L1, which may be older: this kernel began early.

typedef unsigned u32;
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

constexpr int PADDED = (WIDTH + 255) / 256 * 256;
constexpr int SHARE = PADDED / 4 / CLUSTER;  // parts of four columns that a block has
constexpr int ITEMS = (SHARE + THREADS - 1) / THREADS;
constexpr int WARPS = THREADS / 32;
static_assert(WIDTH % 4 == 0 && THREADS % 32 == 0 && PADDED % (4 * CLUSTER) == 0, "parts of four columns");
#if KIND == 2
static_assert(HEAD <= 128 && (HEAD & (HEAD - 1)) == 0 && SHARE % (HEAD / 4) == 0, "a head lies in one warp");
#endif

DEVICE float across(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float4 load(const float* p) { return __ldcg((const float4*)p); }
DEVICE float opened(float x) { return __fdividef(x, 1.f + __expf(-x)); }
DEVICE float largest(float4 v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }
DEVICE float squares(float4 v) { return fmaf(v.x, v.x, v.y * v.y) + fmaf(v.z, v.z, v.w * v.w); }
DEVICE u32 to_half2(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// The sum and the largest magnitude of a row.
struct Found {
  float sum, peak;
};
DEVICE Found joined(Found a, Found b) { return Found{a.sum + b.sum, fmaxf(a.peak, b.peak)}; }

#if CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Into the same variable of block `rank`.
DEVICE void give(Found* to, Found v, int rank) {
  u32 at;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(to)), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0],{%1,%2};" ::"r"(at), "f"(v.sum), "f"(v.peak) : "memory");
}
#else
#define OF_CLUSTER
DEVICE void cluster_arrive() {}
#endif

// Of the whole row, to all its threads; in the same order for any number of rows.
DEVICE Found of_row(Found own) {
  __shared__ Found of_warps[WARPS];
  UNROLL for (int mask = 16; mask; mask >>= 1) own = joined(own, Found{across(own.sum, mask), across(own.peak, mask)});
  if ((threadIdx.x & 31) == 0) of_warps[threadIdx.x >> 5] = own;
  __syncthreads();
  Found all = of_warps[0];
  UNROLL for (int warp = 1; warp < WARPS; warp++) all = joined(all, of_warps[warp]);
#if CLUSTER > 1
  __shared__ Found of_blocks[CLUSTER];
  cluster_wait();  // all blocks of the row have begun
  if (threadIdx.x < CLUSTER) give(of_blocks + blockIdx.x, all, threadIdx.x);
  cluster_arrive();
  cluster_wait();
  all = of_blocks[0];
  UNROLL for (int block = 1; block < CLUSTER; block++) all = joined(all, of_blocks[block]);
#endif
  return all;
}

// x, y [rows]: stride floats apart, aligned to 16 bytes. KIND 0: without y, x itself is normed and total not written.
// Column k of row m of out is at (k / 32) * group_stride + m * row_stride + k % 32.
extern "C" __global__ void OF_CLUSTER __launch_bounds__(THREADS, 1)
rows(const float* x, const float* y, const float* __restrict__ weight, float* total, unsigned short* out, float* scale,
     long long x_stride, long long y_stride, long long group_stride, long long row_stride, float eps) {
#if OVERLAP
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  cluster_arrive();
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
#if OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  float4 value[ITEMS], other[ITEMS];
  UNROLL for (int i = 0; i < ITEMS; i++) value[i] = inside(i) ? load(x + row * x_stride + column(i)) : nothing;
  UNROLL for (int i = 0; i < ITEMS; i++) other[i] = y && inside(i) ? load(y + row * y_stride + column(i)) : nothing;
  Found own = {0.f, 0.f};
  UNROLL for (int i = 0; i < ITEMS; i++) {
    float4 v = value[i];
    const float4 o = other[i];
#if KIND == 0
    v = make_float4(v.x + o.x, v.y + o.y, v.z + o.z, v.w + o.w);
    if (y && inside(i)) *(float4*)(total + row * (long long)WIDTH + column(i)) = v;
    own.sum += squares(v);
    v = make_float4(v.x * factor[i].x, v.y * factor[i].y, v.z * factor[i].z, v.w * factor[i].w);
#elif KIND == 1
    v = make_float4(opened(v.x) * o.x, opened(v.y) * o.y, opened(v.z) * o.z, opened(v.w) * o.w);
#else
    float sum = squares(v);
    UNROLL for (int mask = HEAD / 8; mask; mask >>= 1) sum += across(sum, mask);
    const float times = rsqrtf(sum / HEAD + eps);
    v = make_float4(v.x * times * factor.x * opened(o.x), v.y * times * factor.y * opened(o.y),
                    v.z * times * factor.z * opened(o.z), v.w * times * factor.w * opened(o.w));
#endif
    own.peak = fmaxf(own.peak, largest(v));
    value[i] = v;
  }
  const Found all = of_row(own);
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
    *(uint2*)(out + (k >> 5) * group_stride + row * row_stride + (k & 31)) =
        make_uint2(to_half2(v.x * norm * up, v.y * norm * up), to_half2(v.z * norm * up, v.w * norm * up));
  }
}
