// Enough of CUDA for a kernel on a CPU. The threads of a block are fibers of one thread, which go on in turn wherever a
// kernel lets them meet; blocks run one after the other. A warp's mma is computed by its lanes from each other's registers.
// Asynchronous copies arrive when they are waited for, not before.
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>
#include <csignal>
#include <sys/mman.h>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __restrict__
#define __global__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct uint4 {
  unsigned x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct int4 {
  int x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
struct Index {
  unsigned x = 0, y = 0;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
alignas(1024) static unsigned char shared_memory[1 << 18];

// ---------------------------------------------------------------- fibers

constexpr size_t STACK = 1 << 18;
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  int bytes, filled;
};
struct Fiber {
  ucontext_t start;
  jmp_buf place;
  bool started, ended;
  std::deque<std::vector<Copy>> copies;  // groups; the last one is open
};
static std::deque<Fiber> fibers;
static std::vector<char*> stacks;
static void (*body)();
static jmp_buf launcher;
static int current, alive, step = 1, idle;
static char failure[200];  // of a kernel; empty: none

// Ends the kernel.
[[noreturn]] static void fail(const char* what) {
  snprintf(failure, sizeof failure, "block %u, %u, thread %d: %s", blockIdx.x, blockIdx.y, current, what);
  _longjmp(launcher, 1);
}
static void on_signal(int) { fail("it accessed memory that is not there"); }

static void resume(int fiber) {
  current = fiber;
  threadIdx.x = fiber;
  if (fibers[fiber].started) _longjmp(fibers[fiber].place, 1);
  fibers[fiber].started = true;
  setcontext(&fibers[fiber].start);
}
static int next_fiber() {
  const int count = (int)fibers.size();
  int next = current;
  do next = (next + step + count) % count;
  while (fibers[next].ended);
  return next;
}
// Lets the other fibers go on.
__attribute__((noinline)) static void yield() {
  if (++idle > 4 * (int)fibers.size()) fail("it waits, as all others do, for threads that never come");
  const int self = current;
  if (!_setjmp(fibers[self].place)) resume(next_fiber());
  asm volatile("" ::: "memory");
}

// Where a number of threads wait for each other; those that have ended are not waited for.
struct Meeting {
  int expected = 0, arrived = 0;
  unsigned round = 0;
  void update() {
    if (arrived && arrived >= expected) arrived = 0, round++, idle = 0;
  }
  void arrive_and_wait() {
    const unsigned own = round;
    arrived++;
    update();
    while (round == own) yield();
  }
  void leave() { expected--, update(); }
};
static Meeting of_block, of_warps[32], named[16];

static void enter() {
  body();
  Fiber& fiber = fibers[current];
  fiber.ended = true;
  idle = 0, alive--;
  of_block.leave(), of_warps[current / 32].leave();
  if (!alive) _longjmp(launcher, 1);
  resume(next_fiber());
}

constexpr int GUARDED = 4096;  // bytes after a block's shared memory, which it must not write
// Runs the blocks of a grid one after the other. Shared memory, `shared` bytes, holds NaN before each.
template <class Kernel>
void launch_grid(int columns, int rows, int threads, int shared, Kernel kernel) {
  static Kernel* current_kernel;
  current_kernel = &kernel;
  body = [] { (*current_kernel)(); };
  gridDim.x = columns, gridDim.y = rows, blockDim.x = threads;
  while ((int)stacks.size() < threads) {
    void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) abort();
    stacks.push_back((char*)stack);
  }
  fibers.resize(threads);
  failure[0] = 0;
  struct sigaction previous, own = {};
  own.sa_handler = on_signal;
  own.sa_flags = SA_NODEFER;
  sigaction(SIGSEGV, &own, &previous);
  const size_t used = shared + GUARDED < sizeof shared_memory ? shared + GUARDED : sizeof shared_memory;
  for (int block = 0; block < columns * rows && !failure[0]; block++) {
    blockIdx.x = block % columns, blockIdx.y = block / columns;
    memset(shared_memory, 0x7f, used);
    for (int thread = 0; thread < threads; thread++) {
      Fiber& fiber = fibers[thread];
      fiber.started = fiber.ended = false;
      fiber.copies.assign(1, {});
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = stacks[thread];
      fiber.start.uc_stack.ss_size = STACK;
      makecontext(&fiber.start, enter, 0);
    }
    of_block = {threads}, alive = threads, idle = 0;
    for (int warp = 0; warp < 32; warp++) of_warps[warp] = {32}, named[warp % 16] = {};
    if (!_setjmp(launcher)) resume(step > 0 ? 0 : threads - 1);
    for (size_t at = shared; at < used && !failure[0]; at++)
      if (shared_memory[at] != 0x7f) snprintf(failure, sizeof failure, "block %d wrote shared memory that it does not have", block);
  }
  sigaction(SIGSEGV, &previous, nullptr);
}
template <class Kernel>
void launch(int blocks, int threads, Kernel kernel) {
  launch_grid(blocks, 1, threads, sizeof shared_memory, kernel);
  if (failure[0]) fprintf(stderr, "%s\n", failure), abort();
}
extern "C" const char* failed() { return failure; }
// Whether threads go on from the first to the last, or from the last to the first: a missing barrier shows in one of them.
extern "C" void run_backwards(int backwards) { step = backwards ? -1 : 1; }

// ---------------------------------------------------------------- what a block's threads do together

static void __syncthreads() { of_block.arrive_and_wait(); }
static void __syncwarp() { of_warps[threadIdx.x / 32].arrive_and_wait(); }
static void named_barrier(int number, int threads) {
  named[number].expected = threads;
  named[number].arrive_and_wait();
}
static int __syncthreads_or(int predicate) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= predicate;
  __syncthreads();
  return any;
}
// Another lane's value.
template <class T>
T of_lane(T x, int lane) {
  static uint64_t values[32][32];
  const int warp = threadIdx.x / 32;
  memcpy(&values[warp][threadIdx.x % 32], &x, sizeof x);
  __syncwarp();
  memcpy(&x, &values[warp][lane], sizeof x);
  __syncwarp();
  return x;
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) { return of_lane(x, lane % 32); }
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) { return of_lane(x, threadIdx.x % 32 ^ mask); }
template <class T>
T __shfl_up_sync(unsigned, T x, int distance) {
  const int lane = threadIdx.x % 32;
  return of_lane(x, lane < distance ? lane : lane - distance);
}
static unsigned __ballot_sync(unsigned, int predicate) {
  unsigned all = 0;
  for (int lane = 0; lane < 32; lane++) all |= (unsigned)!!of_lane(predicate, lane) << lane;
  return all;
}
static int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

static void copy_later(void* to, const void* from, int bytes, int filled) {
  fibers[current].copies.back().push_back({(unsigned char*)to, (const unsigned char*)from, bytes, filled});
}
static void commit_copies() { fibers[current].copies.emplace_back(); }
// Waits for all groups but the newest `pending`.
static void wait_for_copies(int pending) {
  auto& groups = fibers[current].copies;
  for (; (int)groups.size() > pending + 1; groups.pop_front())
    for (const Copy& copy : groups.front()) {
      memset(copy.to + copy.bytes, 0, copy.filled - copy.bytes);
      memcpy(copy.to, copy.from, copy.bytes);
    }
}

// ---------------------------------------------------------------- what a thread does alone

template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
T __ldg(const T* p) { return *p; }
template <class To, class From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
static float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static float __int_as_float(int x) { return bits_as<float>(x); }
static unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static int __float_as_int(float x) { return bits_as<int>(x); }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fadd_rn(float x, float y) { return x + y; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
#define __expf expf
static float __fdividef(float x, float y) { return x / y; }
static int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }

static float half(unsigned bits) { return (float)bits_as<_Float16>((uint16_t)bits); }
static unsigned two_halves(float low, float high) {
  return bits_as<uint16_t>((_Float16)low) | (unsigned)bits_as<uint16_t>((_Float16)high) << 16;
}
static unsigned two_bfloats(float low, float high) {
  const auto rounded = [](float x) {
    const unsigned bits = bits_as<unsigned>(x);
    return x != x ? 0x7fffu : bits + 0x7fff + (bits >> 16 & 1) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
}
// One rounding, as fma.rn.f16x2: a product of two halves and a sum are exact in double.
static unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
  unsigned result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const _Float16 value = (_Float16)((double)half(a >> shift) * half(b >> shift) + half(c >> shift));
    result |= (unsigned)bits_as<uint16_t>(value) << shift;
  }
  return result;
}
static unsigned permuted(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

// ---------------------------------------------------------------- mma

// A number of 16 bits: float16 or bfloat16.
template <bool BFLOAT>
float number(unsigned bits) { return BFLOAT ? bits_as<float>(bits << 16) : half(bits); }

// What the lanes of a warp have of a fragment [16][16].
static unsigned fragments[32][32][4];
static float of_fragment(const unsigned (*lanes)[4], int row, int k, bool bfloat) {
  const unsigned word = lanes[4 * (row % 8) + k % 8 / 2][row / 8 + 2 * (k / 8)] >> 16 * (k % 2);
  return bfloat ? number<true>(word & 0xffff) : number<false>(word & 0xffff);
}
// mma.m16n8k16 with float32 sums.
template <bool BFLOAT = false>
void warp_mma(float* sums, const unsigned* a, unsigned b0, unsigned b1) {
  static unsigned columns[32][32][2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  memcpy(fragments[warp][lane], a, 16);
  columns[warp][lane][0] = b0, columns[warp][lane][1] = b1;
  __syncwarp();
  for (int e = 0; e < 4; e++) {
    const int row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      const unsigned y = columns[warp][4 * column + k % 8 / 2][k / 8] >> 16 * (k % 2) & 0xffff;
      sum += (double)of_fragment(fragments[warp], row, k, BFLOAT) * number<BFLOAT>(y);
    }
    sums[e] += (float)sum;
  }
  __syncwarp();
}
// wgmma.m64nNk16 of one of the group's warps, which has 16 rows: the second operand, [N][16], is found by the low half of
// its descriptor, in rows of 128 bytes and the 128-byte swizzle: address bits 4 to 6 are those of the row in eight.
template <int COLUMNS, bool BFLOAT>
void group_mma(float* sums, const unsigned* a, unsigned descriptor, int more) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  memcpy(fragments[warp][lane], a, 16);
  __syncwarp();
  for (int i = 0; i < COLUMNS / 2; i++) {
    const int row = lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      const unsigned at = ((descriptor & 0x3fff) << 4) + column * 128 + k * 2;
      uint16_t y;
      memcpy(&y, shared_memory + (at ^ (at >> 7 & 7) << 4), 2);
      sum += (double)of_fragment(fragments[warp], row, k, BFLOAT) * number<BFLOAT>(y);
    }
    sums[i] = (more ? sums[i] : 0) + (float)sum;
  }
  __syncwarp();
}
