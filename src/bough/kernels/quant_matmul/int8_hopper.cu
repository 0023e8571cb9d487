// Matmuls in int8 with scales for groups of 128 columns on Hopper: warp-group mma, bulk copies, one resident block an SM.
//
// No headers: NVRTC builds this file with no include path. int8_hopper.py adds `mma`, one step of 32 columns.
// x and w are in tiles of 128 rows x 128 columns, [K/128][rows/128][16 KiB], in the hardware's 128-byte swizzle: a tile is one
// contiguous copy. A block of the output is 128 rows of x times 256 of w. Each of two warp groups has 64 rows of x: sums in
// int32 of 128 columns of w at a time, exact, and float32 sums of all 256. While one group scales and adds its int32 sums to
// the others, the tensor cores work for the other group. A third group only starts copies, up to STAGES steps ahead, also
// into the next block while the sums of this one are stored.

typedef unsigned char u8;
typedef unsigned u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

constexpr int THREADS = 384, STAGES = 4, TILE = 128 * 128, STAGE = 3 * TILE;
constexpr int AHEAD = 8;  // pairs of scales that are loaded ahead
constexpr int BAND = 8;  // blocks of x that neighbouring blocks of the grid share, for the L2 cache

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(b), "r"(n)); }
DEVICE void barrier_wait(u32 b, u32 phase) {
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @p bra done; bra again; done: }" ::"r"(b), "r"(phase) : "memory");
}
DEVICE void barrier_expect(u32 b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(b), "r"(n) : "memory"); }
DEVICE void barrier_arrive(u32 b) { asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(b) : "memory"); }
DEVICE void bulk_copy(u32 to, const void* from, u32 n, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to), "l"(from), "r"(n), "r"(b) : "memory");
}
// The low half of an operand's descriptor, in 16 bytes; the other half is in int8_hopper.py.
DEVICE u32 rows_at(u32 address) { return address >> 4 | 1u << 16; }

// Not to be moved by the compiler.
DEVICE float2 load_scales(const float* p) {
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0,%1},[%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}

struct Block {
  int m, n;
};
// Block number `index` of the output; those of a band of x come together.
DEVICE Block block_of(int index, int down, int across) {
  const int band = index / (BAND * across), within = index - band * (BAND * across);
  const int high = min(down - band * BAND, BAND);
  return {band * BAND + within % high, within / high};
}

// out [rows, stride] = x w^T for `columns` rows of w; scales are [K/128][x_padded] and [K/128][w_padded].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
int8_matmul(const u8* __restrict__ x, const float* __restrict__ x_scales, const u8* __restrict__ w, const float* __restrict__ w_scales,
            float* __restrict__ out, int rows, int columns, int x_padded, int w_padded, int depth, long long stride) {
  extern __shared__ __align__(1024) u8 ring[];
  const u32 ring0 = shared_address(ring), full = ring0 + STAGES * STAGE, empty = full + 8 * STAGES;
  const int group = threadIdx.x >> 7, down = (rows + 127) / 128, across = (columns + 255) / 256, blocks = down * across;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 8);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  int slot = 0;
  u32 phase = 0;
  auto advance = [&]() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  };
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 256)
      for (int index = blockIdx.x; index < blocks; index += gridDim.x) {
        const Block block = block_of(index, down, across);
        for (int step = 0; step < depth; step++) {
          const u32 to = ring0 + slot * STAGE, arrived = full + 8 * slot;
          barrier_wait(empty + 8 * slot, phase ^ 1);
          barrier_expect(arrived, STAGE);
          bulk_copy(to, x + ((size_t)step * (x_padded / 128) + block.m) * TILE, TILE, arrived);
          bulk_copy(to + TILE, w + ((size_t)step * (w_padded / 128) + 2 * block.n) * TILE, 2 * TILE, arrived);
          advance();
        }
      }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int lane = threadIdx.x & 31, row = group * 64 + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2), column = 2 * (lane & 3);
    for (int index = blockIdx.x; index < blocks; index += gridDim.x) {
      const Block block = block_of(index, down, across);
      const float* a = x_scales + block.m * 128 + row;
      const float* b = w_scales + block.n * 256 + column;
      float sums[2][64];
      UNROLL for (int h = 0; h < 2; h++)
        UNROLL for (int i = 0; i < 64; i++) sums[h][i] = 0;
      for (int step = 0; step < depth; step++) {
        const u32 at = rows_at(ring0 + slot * STAGE);
        const float a0 = __ldg(a), a1 = __ldg(a + 8);
        barrier_wait(full + 8 * slot, phase);
        UNROLL for (int h = 0; h < 2; h++) {
          int part[64];
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
          UNROLL for (int k = 0; k < 4; k++) mma(part, at + group * (64 * 128 / 16) + 2 * k, at + (1 + h) * (TILE / 16) + 2 * k, k);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          // The first scales arrive while the tensor cores work; there are no registers for all of them.
          float2 scale[AHEAD];
          UNROLL for (int j = 0; j < AHEAD; j++) scale[j] = load_scales(b + h * 128 + 8 * j);
          asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
          if (h == 1 && lane == 0) barrier_arrive(empty + 8 * slot);
          UNROLL for (int j = 0; j < 16; j++) {
            UNROLL for (int e = 0; e < 4; e++) {
              const float times = (e < 2 ? a0 : a1) * (e & 1 ? scale[j % AHEAD].y : scale[j % AHEAD].x);
              sums[h][4 * j + e] = fmaf((float)part[4 * j + e], times, sums[h][4 * j + e]);
            }
            if (j + AHEAD < 16) scale[j % AHEAD] = load_scales(b + h * 128 + 8 * (j + AHEAD));
          }
        }
        a += x_padded, b += w_padded;
        advance();
      }
      // Read again, so that comparisons with it are not kept in registers for the whole loop.
      int left;
      asm volatile("mov.u32 %0,%1;" : "=r"(left) : "r"(columns - block.n * 256 - column));
      const bool pairs = !(stride & 1) && !((u64)out & 7);
      UNROLL for (int r = 0; r < 2; r++) {
        const int m = block.m * 128 + row + 8 * r;
        float* to = out + m * stride + block.n * 256 + column;
        if (m >= rows) continue;
        UNROLL for (int h = 0; h < 2; h++)
          UNROLL for (int j = 0; j < 16; j++) {
            const int n = h * 128 + 8 * j;
            const float first = sums[h][4 * j + 2 * r], second = sums[h][4 * j + 2 * r + 1];
            if (pairs && n + 1 < left) {
              *(float2*)(to + n) = make_float2(first, second);
            } else {
              if (n < left) to[n] = first;
              if (n + 1 < left) to[n + 1] = second;
            }
          }
      }
    }
  }
}
