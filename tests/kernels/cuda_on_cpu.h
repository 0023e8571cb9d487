// Enough of CUDA for a kernel on a CPU: every thread of a block is a thread, blocks run one after the other, a warp's
// mma is computed by its lanes from each other's registers, copies to shared memory are complete at once.
#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __restrict__
#define __global__
#define __shared__ static
#define __align__(n)
#define __launch_bounds__(threads, blocks)

struct uint4 {
  unsigned x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct int4 {
  int x, y, z, w;
};
struct Index {
  unsigned x = 0, y = 0;
};
static thread_local Index threadIdx;
static Index blockIdx, gridDim;
static std::unique_ptr<std::barrier<>> of_block;
static std::vector<std::unique_ptr<std::barrier<>>> of_warps;
static unsigned char shared_memory[1 << 18];

static void __syncthreads() { of_block->arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float x, int) { return x; }
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}

static float half(unsigned bits) {
  const uint16_t low = (uint16_t)bits;
  _Float16 value;
  memcpy(&value, &low, 2);
  return (float)value;
}
// One rounding, as fma.rn.f16x2: a product of two halves and a sum are exact in double.
static unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
  unsigned result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const _Float16 value = (_Float16)((double)half(a >> shift) * half(b >> shift) + half(c >> shift));
    uint16_t bits;
    memcpy(&bits, &value, 2);
    result |= (unsigned)bits << shift;
  }
  return result;
}

struct Operands {
  unsigned a[4], b[2];
};
static Operands operands[32][32];
// mma.m16n8k16 with float32 sums.
static void warp_mma(float* sums, const unsigned* a, unsigned b0, unsigned b1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Operands& mine = operands[warp][lane];
  memcpy(mine.a, a, 16);
  mine.b[0] = b0, mine.b[1] = b1;
  of_warps[warp]->arrive_and_wait();
  for (int e = 0; e < 4; e++) {
    const int row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      const unsigned x = operands[warp][4 * (row % 8) + k % 8 / 2].a[row / 8 + 2 * (k / 8)];
      const unsigned y = operands[warp][4 * column + k % 8 / 2].b[k / 8];
      sum += (double)half(x >> 16 * (k % 2)) * half(y >> 16 * (k % 2));
    }
    sums[e] += (float)sum;
  }
  of_warps[warp]->arrive_and_wait();
}

// Runs a kernel of `threads` threads; shared memory holds NaN before each block.
template <class Kernel>
void launch(int blocks, int threads, Kernel kernel) {
  of_block = std::make_unique<std::barrier<>>(threads);
  of_warps.clear();
  for (int warp = 0; warp < threads / 32; warp++) of_warps.push_back(std::make_unique<std::barrier<>>(32));
  gridDim.x = blocks;
  for (int block = 0; block < blocks; block++) {
    blockIdx.x = block;
    memset(shared_memory, 0x7f, sizeof shared_memory);
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; thread++)
      running.emplace_back([=] {
        threadIdx.x = thread;
        kernel();
      });
    for (auto& each : running) each.join();
  }
}
