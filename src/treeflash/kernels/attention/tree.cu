// Attention of a tree's rows over one split of a paged context (reference.py says what it is; kernel.py merges).
//
// No headers: NVRTC builds this file with no include path. Macros, given by cuda.py:
//   KEYS, VALUES  how they are stored: 0 float16, 1 bfloat16, 2 q8_0, 3 q5_0, 4 q4_0, 5 tq3_0
//   QUERIES       of a block of the grid: nodes x query heads of one KV head, node-major; a multiple of 8 up to 24, or of 48
//   STAGES        of the rings of keys and of values      SHARED    bytes of shared memory     RESIDENT  blocks of an SM
//   SPLITS, SINKS, PAGE, WINDOW (0 or 1)                   FIRST0.., LAST0..  signs of the rotation, 32 in a word
//   LEVEL0..3     of tq3_0: low bytes, then high bytes, of eight float16
//   OVERLAP       1: launched before the kernel in front of it has ended (sm_90 and up)
//
// Keys, and then dims of values, are the 16-row operand of mma.m16n8k16: S^T = K Q^T and O^T = V^T P^T, so queries are
// padded to 8 and codes go from shared memory into a fragment's registers. Which dim or key stands in which row or column of
// a fragment is free. A lane always reads 8 neighbouring dims of one token, a unit:
//   K^T: unit 4 j + lane % 4 of tokens g and g + 8 (g = lane / 4) is what it has of the two steps of 16 dims in group j of 32;
//   V^T: unit 8 w + g of tokens 16 k + {0, 8, 4, 12} + lane % 4 is rows g and g + 8 of the four tiles of warp group w.
// A query's sums are formed in the same order whatever QUERIES is, and follow from that query alone.

typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned char u8;
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Copies past L1; what lies behind the first `given` bytes becomes zeros.
DEVICE void copy16(void* to, const void* from, int given) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared_address(to)), "l"(from), "r"(given) : "memory");
}
DEVICE void copy4(void* to, const void* from, int given) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"(shared_address(to)), "l"(from), "r"(given) : "memory");
}
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
DEVICE u32 sub2(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
template <int STORED>
DEVICE u32 pack(float low, float high) {
  u32 d;
  if (STORED == 1)
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
template <int STORED>
DEVICE void mma(float* c, const u32* a, u32 b0, u32 b1) {
  if (STORED == 1)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// threadIdx.x, read again: addresses that follow from it are not kept in registers for the whole loop.
DEVICE int own_number() {
  int number;
  asm volatile("mov.u32 %0,%%tid.x;" : "=r"(number));
  return number;
}
DEVICE float across(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE bool any(bool x) { return __any_sync(0xffffffffu, x); }
DEVICE void let_next_start() {
#if OVERLAP
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void wait_for_inputs() {
#if OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

constexpr int D = 256;
constexpr int BLOCK = 64;  // keys at a time; a page holds a multiple of them
constexpr int UNITS = D / 8;
constexpr int TILES = QUERIES / 8;
constexpr bool WIDE = QUERIES >= 48;
constexpr int WARPS = WIDE ? 12 : 4;
constexpr int THREADS = 32 * WARPS;
// How warps share S^T [4 tiles of keys][TILES], and O^T [16 tiles of dims][TILES].
constexpr int KEY_PARTS = WIDE ? 2 : 4;
constexpr int KEY_TILES = 4 / KEY_PARTS;
constexpr int SCORE_TILES = TILES * KEY_PARTS / WARPS;
constexpr int SCORE_STEPS = WIDE ? 2 : UNITS / 4;  // unrolled: registers
constexpr int DIM_PARTS = 4;
constexpr int SUM_TILES = TILES * DIM_PARTS / WARPS;
static_assert(SCORE_TILES * WARPS == TILES * KEY_PARTS && SUM_TILES * WARPS == TILES * DIM_PARTS, "QUERIES");
#define NONE __uint_as_float(0xff800000u)  // minus infinity

template <int STORED>
struct Rows {
  static constexpr bool CODED = STORED >= 2;
  static constexpr int MAIN = STORED < 2 ? 2 * D : STORED == 2 ? D : STORED == 5 ? D / 4 : D / 2;  // bytes of the first plane
  static constexpr int BITS = STORED == 3 || STORED == 5 ? D / 8 : 0;                              // and of the second
  static constexpr int BYTES = MAIN + BITS;
  static constexpr int SCALES = STORED == 5 ? 4 : CODED ? D / 16 : 0;
  static constexpr int STAGE = BLOCK * (BYTES + SCALES);
};
typedef Rows<KEYS> KeyRows;
typedef Rows<VALUES> ValueRows;

// Where a row's 16 bytes number `part` lie: lanes of one access must meet different banks. FLAT: read by 4 rows' lanes of 16
// bytes each (floats as keys); else 8 rows of 8 bytes, or 2 rows of 16.
template <int MAIN, bool FLAT>
DEVICE int place_of(int row, int part) {
  const int turned = FLAT ? part ^ ((row & 1) << 2) : MAIN == 64 ? part ^ (row & 2) : part ^ ((row & 3) << 1);
  return row * MAIN + turned * 16;
}

// Tokens of a block in the pool: row r is at first + r, from `turn` on, which is the next page, at second + r.
struct Tokens {
  long long first, second;
  int turn, count;
};

// PARTS times 16 bytes of every row, from byte `from` of the row on; PLAIN: all rows are there, in one page.
template <int BYTES, int PARTS, bool PLAIN, class Place>
DEVICE void fetch_plane(const u8* codes, int from, const Tokens& tokens, Place place) {
  constexpr int STEP = THREADS / PARTS;
  static_assert(THREADS % PARTS == 0 && STEP % 4 == 0, "places of rows STEP apart differ by a constant");
  const int thread = own_number(), row0 = thread / PARTS, part = thread % PARTS;
  const u8* source = codes + (tokens.first + row0) * BYTES + from + part * 16;
  u8* to = place(row0, part);
  const int apart = (int)(place(row0 + 4, part) - to) / 4;
  UNROLL for (int n = 0; n < (BLOCK + STEP - 1) / STEP; n++) {
    const int row = n * STEP + row0;
    if (BLOCK % STEP && row >= BLOCK) break;
    const u8* at = source + n * STEP * BYTES;
    if (!PLAIN && row >= tokens.turn) at += (tokens.second - tokens.first) * BYTES;
    const bool there = PLAIN || row < tokens.count;
    copy16(to + n * STEP * apart, there ? at : codes, there ? 16 : 0);
  }
}
template <int STORED, bool FLAT, bool PLAIN>
DEVICE void fetch_rows(u8* stage, const u8* codes, const u8* scales, const Tokens& tokens) {
  typedef Rows<STORED> R;
  fetch_plane<R::BYTES, R::MAIN / 16, PLAIN>(codes, 0, tokens, [&](int row, int part) { return stage + place_of<R::MAIN, FLAT>(row, part); });
  if (R::BITS)
    fetch_plane<R::BYTES, 2, PLAIN>(codes, R::MAIN, tokens, [&](int row, int part) { return stage + BLOCK * R::MAIN + row * 32 + part * 16; });
  const int row = own_number();
  if (R::CODED && row < BLOCK) {
    const bool there = PLAIN || row < tokens.count;
    const long long at = (PLAIN || row < tokens.turn ? tokens.first : tokens.second) + row;
    u8* to = stage + BLOCK * R::BYTES + row * R::SCALES;
    const u8* from = there ? scales + at * R::SCALES : scales;
    if (R::SCALES == 4) copy4(to, from, there ? 4 : 0);
    else copy16(to, from, there ? 16 : 0);
  }
}
template <int STORED, bool FLAT>
DEVICE void fetch(u8* stage, const u8* codes, const u8* scales, const Tokens tokens) {
  if (tokens.count == BLOCK && tokens.turn >= BLOCK)
    fetch_rows<STORED, FLAT, true>(stage, codes, scales, tokens);
  else
    fetch_rows<STORED, FLAT, false>(stage, codes, scales, tokens);
}

// A unit of a row: 8 float16 (or bfloat16), before their scale.
template <int STORED, bool FLAT>
DEVICE void unit_of(u32* halves, const u8* stage, int row, int unit) {
  typedef Rows<STORED> R;
  if (!R::CODED) {
    const uint4 found = *(const uint4*)(stage + place_of<R::MAIN, FLAT>(row, unit));
    halves[0] = found.x, halves[1] = found.y, halves[2] = found.z, halves[3] = found.w;
    return;
  }
  constexpr int WIDTH = R::MAIN / 8;  // units side by side in the first plane
  const int beside = unit % WIDTH;
  const uint2 main = *(const uint2*)(stage + place_of<R::MAIN, FLAT>(row, beside >> 1) + (beside & 1) * 8);
  uint2 bits = make_uint2(0, 0);
  if (R::BITS) bits = *(const uint2*)(stage + BLOCK * R::MAIN + row * R::BITS + unit % 4 * 8);
  UNROLL for (int i = 0; i < 2; i++) {
    u32 code = i ? main.y : main.x;
    if (STORED == 2) code ^= 0x80808080u;
    if (STORED == 3 || STORED == 4) code = (code >> (unit / WIDTH * 4)) & 0x0f0f0f0fu;
    if (STORED == 5) code = (code >> (unit / WIDTH * 2)) & 0x03030303u;
    if (R::BITS) code |= (((i ? bits.y : bits.x) >> (unit / 4)) & 0x01010101u) << (STORED == 3 ? 4 : 2);
    if (STORED == 5) {
      const u32 choice = permute(code | code >> 4, 0, 0x4420);  // a code in each of four nibbles
      const u32 low = permute(LEVEL0, LEVEL1, choice), high = permute(LEVEL2, LEVEL3, choice);
      halves[2 * i] = permute(low, high, 0x5140);
      halves[2 * i + 1] = permute(low, high, 0x7362);
    } else {
      // float16 of 1024 + code has the code for its last bits.
      constexpr u32 ZERO = STORED == 2 ? 0x64806480u : STORED == 3 ? 0x64106410u : 0x64086408u;
      halves[2 * i] = sub2(permute(code, 0x64646464u, 0x4140), ZERO);
      halves[2 * i + 1] = sub2(permute(code, 0x64646464u, 0x4342), ZERO);
    }
  }
}
template <int STORED>
DEVICE u32 scale_of(const u8* stage, int row, int unit) {
  typedef Rows<STORED> R;
  return *(const unsigned short*)(stage + BLOCK * R::BYTES + row * R::SCALES + (STORED == 5 ? unit / 16 : unit / 4) * 2);
}

struct __align__(128) Memory {
  uint4 queries[TILES][UNITS / 4][32];  // as mma reads its second operand, two steps of 16 dims in 16 bytes
  u32 shares[TILES][4][32][2];          // likewise, steps of 16 keys
  float maxima[4][QUERIES];             // of parts of the keys; at the end the weights of the tiles of keys
  float tops[2][QUERIES];
  float fade[QUERIES];
  int oldest[QUERIES];
  int held[BLOCK];
  u64 seen[QUERIES];
  Tokens tokens[3];  // of block b at b modulo 3: those of two blocks are read while a third's are written
};
static_assert(SHARED == sizeof(Memory) + STAGES * (KeyRows::STAGE + ValueRows::STAGE), "SHARED");
// Lanes that write shares of one query and those that read them meet different banks.
DEVICE int slot_of(int query, int part) { return (query * 4 + part) ^ (query >> 2 << 2); }

// Sums and differences in groups of 128 values, 8 to a lane, between two sets of signs.
DEVICE void rotate(float* x, u32 first, u32 last, int lane) {
  UNROLL for (int i = 0; i < 8; i++) x[i] = first >> i & 1 ? -x[i] : x[i];
  UNROLL for (int stride = 1; stride < 8; stride *= 2)
    UNROLL for (int i = 0; i < 8; i++)
      if (!(i & stride)) {
        const float low = x[i], high = x[i + stride];
        x[i] = low + high, x[i + stride] = low - high;
      }
  UNROLL for (int stride = 1; stride < 16; stride *= 2)
    UNROLL for (int i = 0; i < 8; i++) {
      const float other = across(x[i], stride);
      x[i] = lane & stride ? other - x[i] : x[i] + other;
    }
  UNROLL for (int i = 0; i < 8; i++) x[i] *= last >> i & 1 ? -0.08838834764831845f : 0.08838834764831845f;
}

// The block's queries, scaled, rotated where keys are, into shared memory. q: of its item and KV head.
DEVICE void load_queries(Memory& m, const float* q, float scale, int first, int count, int group, int stride) {
  constexpr int AHEAD = WIDE ? 4 : 2;
  static_assert(TILES * 8 % (WARPS * AHEAD) == 0, "QUERIES");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 words[8] = {FIRST0, FIRST1, FIRST2, FIRST3, LAST0, LAST1, LAST2, LAST3};
  u32 signs[2] = {0, 0};
  UNROLL for (int i = 0; i < 4; i++)
    UNROLL for (int k = 0; k < 2; k++)
      if ((lane >> 2 & 3) == i) signs[k] = words[4 * k + i] >> (lane & 3) * 8;
  _Pragma("unroll 1") for (int start = warp; start < QUERIES; start += WARPS * AHEAD) {
    float x[AHEAD][8];
    UNROLL for (int n = 0; n < AHEAD; n++) {
      const int query = first + start + n * WARPS;
      const float4* from = (const float4*)(q + (long long)(query / group) * stride + query % group * D) + 2 * lane;
      float4 low = make_float4(0, 0, 0, 0), high = low;
      if (query < count) low = __ldcg(from), high = __ldcg(from + 1);
      x[n][0] = low.x, x[n][1] = low.y, x[n][2] = low.z, x[n][3] = low.w;
      x[n][4] = high.x, x[n][5] = high.y, x[n][6] = high.z, x[n][7] = high.w;
    }
    UNROLL for (int n = 0; n < AHEAD; n++) {
      // Not to be fused with the sums after it in one variant and apart from them in another.
      UNROLL for (int i = 0; i < 8; i++) x[n][i] = __fmul_rn(x[n][i], scale);
      if (KeyRows::CODED) rotate(x[n], signs[0], signs[1], lane);
      const int query = start + n * WARPS;
      m.queries[query >> 3][lane >> 2][(query & 7) * 4 + (lane & 3)] =
          make_uint4(pack<KEYS>(x[n][0], x[n][1]), pack<KEYS>(x[n][2], x[n][3]), pack<KEYS>(x[n][4], x[n][5]),
                     pack<KEYS>(x[n][6], x[n][7]));
    }
  }
}

DEVICE void score(float (&s)[KEY_TILES][SCORE_TILES][4], const Memory& m, const u8* stage, int key_part, int first_tile) {
  const int lane = own_number() & 31, row0 = key_part * (16 * KEY_TILES) + (lane >> 2);
  UNROLL for (int k = 0; k < KEY_TILES; k++)
    UNROLL for (int n = 0; n < SCORE_TILES; n++) UNROLL for (int e = 0; e < 4; e++) s[k][n][e] = 0.f;
  _Pragma("unroll SCORE_STEPS") for (int j = 0; j < UNITS / 4; j++) {
    u32 a[KEY_TILES][2][4];
    UNROLL for (int k = 0; k < KEY_TILES; k++)
      UNROLL for (int r = 0; r < 2; r++) {
        const int row = row0 + 16 * k + 8 * r;
        u32 halves[4];
        unit_of<KEYS, !KeyRows::CODED>(halves, stage, row, 4 * j + (lane & 3));
        if (KeyRows::CODED) {
          const u32 scale = permute(scale_of<KEYS>(stage, row, 4 * j), 0, 0x1010);
          UNROLL for (int i = 0; i < 4; i++) halves[i] = mul2(halves[i], scale);
        }
        UNROLL for (int i = 0; i < 4; i++) a[k][i >> 1][2 * (i & 1) + r] = halves[i];
      }
    UNROLL for (int n = 0; n < SCORE_TILES; n++) {
      const uint4 b = m.queries[first_tile + n][j][lane];
      UNROLL for (int k = 0; k < KEY_TILES; k++) mma<KEYS>(s[k][n], a[k][0], b.x, b.y);
      UNROLL for (int k = 0; k < KEY_TILES; k++) mma<KEYS>(s[k][n], a[k][1], b.z, b.w);
    }
  }
}

DEVICE void add_values(float (&sum)[4][SUM_TILES][4], const Memory& m, const u8* stage, int dim_part, int first_tile) {
  const int lane = own_number() & 31, unit = 8 * dim_part + (lane >> 2);
  UNROLL for (int step = 0; step < 4; step++) {
    u32 a[4][4];
    UNROLL for (int pair = 0; pair < 2; pair++) {
      const int row = 16 * step + 4 * pair + (lane & 3);
      u32 one[4], other[4];
      unit_of<VALUES, false>(one, stage, row, unit);
      unit_of<VALUES, false>(other, stage, row + 8, unit);
      u32 scales = 0;
      if (ValueRows::CODED) scales = scale_of<VALUES>(stage, row, unit) | scale_of<VALUES>(stage, row + 8, unit) << 16;
      UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int r = 0; r < 2; r++) {
          const u32 both = permute(one[i], other[i], r ? 0x7632 : 0x5410);
          a[i][2 * pair + r] = ValueRows::CODED ? mul2(both, scales) : both;
        }
    }
    UNROLL for (int n = 0; n < SUM_TILES; n++) {
      const uint2 b = *(const uint2*)m.shares[first_tile + n][step][slot_of(lane >> 2, lane & 3)];
      UNROLL for (int i = 0; i < 4; i++) mma<VALUES>(sum[i][n], a[i], b.x, b.y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
tree_attention(const float* q, const u8* key_codes, const u8* key_scales, const u8* value_codes, const u8* value_scales,
               const long long* table, const long long* lengths, const long long* ancestors, const long long* positions,
               float* part_top, float* part_weight, float* part_sum, int* active, float scale, int rows, int table_stride,
               int window, int kv_heads, int group, int tiles) {
  extern __shared__ uint4 memory[];
  Memory& m = *(Memory*)memory;
  u8* key_ring = (u8*)(&m + 1);
  u8* value_ring = key_ring + STAGES * KeyRows::STAGE;
  let_next_start();
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int tile = blockIdx.x % tiles, unit = blockIdx.x / tiles, item = unit / kv_heads, head = unit % kv_heads;
  // The step's own rows are the last split and begin first; splits that a short context leaves empty come last.
  const int split = blockIdx.y == 0 ? SPLITS : blockIdx.y - 1;
  const bool own = split == SPLITS;
  const int length = (int)__ldcg(lengths + item), count = rows * group, first_query = tile * QUERIES;
  // A window's context is the first tokens and what the root sees, from `low` on; others see no more.
  int sinks = length, low = length;
  if (WINDOW) {
    sinks = min(length, SINKS);
    low = max((max(length - window + 1, 0) >> 6) << 6, sinks);
  }
  // See _extent of kernel.py.
  const int span = sinks + length - low;
  int size = max((span + SPLITS - 1) / SPLITS, min((span + SPLITS / 2 - 1) / (SPLITS / 2), 256));
  size = max((size + 63) / 64 * 64, 64);
  const int begin = own ? span : min(split * size, span), end = min(begin + size, span);
  if (own && head == 0 && tile == 0 && thread == 0) active[item] = (span + size - 1) / size;
  const int blocks = own ? 1 : (end - begin + BLOCK - 1) / BLOCK;
  if (blocks == 0) return;

  table += (long long)item * table_stride;
  auto index_of = [&](int block) {
    const int start = begin + block * BLOCK;
    return own ? length : WINDOW && start >= sinks ? start - sinks + low : start;
  };
  auto page_of = [&](int block) { return block < blocks ? (int)__ldcg(table + index_of(block) / PAGE) : 0; };
  auto tokens_of = [&](int block, int number) {
    const int index = index_of(block), offset = index % PAGE;
    Tokens tokens = {((long long)number * kv_heads + head) * PAGE + offset, 0, PAGE - offset, 0};
    tokens.count = own ? rows : min(BLOCK, end - begin - block * BLOCK);
    if (own && offset + rows > PAGE)
      tokens.second = (__ldcg(table + index / PAGE + 1) * kv_heads + head) * PAGE - tokens.turn;
    return tokens;
  };
  auto fetch_keys = [&](int block, const Tokens& tokens) {
    fetch<KEYS, !KeyRows::CODED>(key_ring + block % STAGES * KeyRows::STAGE, key_codes, key_scales, tokens);
  };
  auto fetch_values = [&](int block, const Tokens& tokens) {
    fetch<VALUES, false>(value_ring + block % STAGES * ValueRows::STAGE, value_codes, value_scales, tokens);
  };

  // The context was written in another step: no need to wait for the kernel in front of this one.
  if (own) wait_for_inputs();
  int pages[STAGES + 2];
  UNROLL for (int i = 0; i < STAGES + 2; i++) pages[i] = page_of(i);
  // A group of copies: keys of a block and values of the one before it.
  UNROLL for (int i = 0; i < STAGES; i++) {
    if (i < blocks) fetch_keys(i, tokens_of(i, pages[i]));
    if (i && i <= blocks) fetch_values(i - 1, tokens_of(i - 1, pages[i - 1]));
    end_group();
  }
  if (thread == 0) UNROLL for (int i = STAGES - 1; i <= STAGES; i++) m.tokens[i % 3] = tokens_of(i, pages[i]);
  int ahead = pages[STAGES + 1];
  wait_for_inputs();
  load_queries(m, q + ((long long)item * rows * kv_heads + head) * group * D, scale, first_query, count, group,
               kv_heads * group * D);
  for (int i = thread; i < QUERIES; i += THREADS) {
    const int node = (first_query + i) / group;
    const long long at = (long long)item * rows + node;
    m.tops[0][i] = NONE;
    if (own) m.seen[i] = node < rows ? (u64)__ldcg(ancestors + at) : 0;
    if (WINDOW) m.oldest[i] = node < rows ? (int)__ldcg(positions + at) - window + 1 : 0;
  }
  if (WINDOW && own && thread < rows) m.held[thread] = (int)__ldcg(positions + (long long)item * rows + thread);
  wait_groups<STAGES - 1>();
  __syncthreads();

  const int key_part = warp % KEY_PARTS, score_tile = warp / KEY_PARTS * SCORE_TILES;
  const int dim_part = warp % DIM_PARTS, sum_tile = warp / DIM_PARTS * SUM_TILES;
  float sum[4][SUM_TILES][4], weight[KEY_TILES][SCORE_TILES][2];
  UNROLL for (int i = 0; i < 4; i++)
    UNROLL for (int n = 0; n < SUM_TILES; n++) UNROLL for (int e = 0; e < 4; e++) sum[i][n][e] = 0.f;
  UNROLL for (int k = 0; k < KEY_TILES; k++)
    UNROLL for (int n = 0; n < SCORE_TILES; n++) weight[k][n][0] = weight[k][n][1] = 0.f;

  _Pragma("unroll 1") for (int block = 0; block < blocks; block++) {
    float s[KEY_TILES][SCORE_TILES][4];
    score(s, m, key_ring + block % STAGES * KeyRows::STAGE, key_part, score_tile);
    const int present = own ? rows : min(BLOCK, end - begin - block * BLOCK);
    if (own || WINDOW || present < BLOCK) {
      const int index = index_of(block);
      UNROLL for (int k = 0; k < KEY_TILES; k++)
        UNROLL for (int n = 0; n < SCORE_TILES; n++)
          UNROLL for (int e = 0; e < 4; e++) {
            const int key = (key_part * KEY_TILES + k) * 16 + 8 * (e >> 1) + g, query = (score_tile + n) * 8 + 2 * t + (e & 1);
            bool visible = key < present && (!own || m.seen[query] >> key & 1);
            if (WINDOW) {
              const int at = own ? m.held[key] : index + key;
              visible = visible && (at < SINKS || at >= m.oldest[query]);
            }
            s[k][n][e] = visible ? s[k][n][e] : NONE;
          }
    }
    UNROLL for (int n = 0; n < SCORE_TILES; n++) {
      float top[2];
      UNROLL for (int c = 0; c < 2; c++) {
        top[c] = fmaxf(s[0][n][c], s[0][n][c + 2]);
        UNROLL for (int k = 1; k < KEY_TILES; k++) top[c] = fmaxf(top[c], fmaxf(s[k][n][c], s[k][n][c + 2]));
        UNROLL for (int mask = 4; mask < 32; mask *= 2) top[c] = fmaxf(top[c], across(top[c], mask));
      }
      if (g == 0) *(float2*)(m.maxima[key_part] + (score_tile + n) * 8 + 2 * t) = make_float2(top[0], top[1]);
    }
    __syncthreads();  // maxima; and all have done with these keys and the values before them
    if (block + STAGES <= blocks) fetch_values(block + STAGES - 1, m.tokens[(block + STAGES - 1) % 3]);
    if (block + STAGES < blocks) fetch_keys(block + STAGES, m.tokens[(block + STAGES) % 3]);
    end_group();
    if (thread == 0) {
      m.tokens[(block + STAGES + 1) % 3] = tokens_of(block + STAGES + 1, ahead);
      ahead = page_of(block + STAGES + 2);
    }

    UNROLL for (int n = 0; n < SCORE_TILES; n++) {
      const int query = (score_tile + n) * 8 + 2 * t;
      const float2 top = *(const float2*)(m.tops[block & 1] + query);
      float2 higher = top;
      UNROLL for (int k = 0; k < KEY_PARTS; k++) {
        const float2 found = *(const float2*)(m.maxima[k] + query);
        higher = make_float2(fmaxf(higher.x, found.x), fmaxf(higher.y, found.y));
      }
      // Seen nothing yet: any number will do.
      const float2 level = make_float2(higher.x == NONE ? 0.f : higher.x, higher.y == NONE ? 0.f : higher.y);
      const float2 fade = make_float2(power_of_two(top.x - level.x), power_of_two(top.y - level.y));
      float p[KEY_TILES][4];
      UNROLL for (int k = 0; k < KEY_TILES; k++) {
        UNROLL for (int e = 0; e < 4; e++) p[k][e] = power_of_two(s[k][n][e] - (e & 1 ? level.y : level.x));
        weight[k][n][0] = fmaf(weight[k][n][0], fade.x, p[k][0] + p[k][2]);
        weight[k][n][1] = fmaf(weight[k][n][1], fade.y, p[k][1] + p[k][3]);
      }
      if (key_part == 0 && g == 0) {
        *(float2*)(m.fade + query) = fade;
        *(float2*)(m.tops[~block & 1] + query) = higher;
      }
      UNROLL for (int k = 0; k < KEY_TILES; k++)
        UNROLL for (int c = 0; c < 2; c++)
          m.shares[score_tile + n][key_part * KEY_TILES + k][slot_of(2 * t + c, g & 3)][g >> 2] =
              pack<VALUES>(p[k][c], p[k][c + 2]);
    }
    wait_groups<STAGES - 1>();
    __syncthreads();  // shares, fade; these values and the keys after these

    float2 fade[SUM_TILES];
    bool fades = false;
    UNROLL for (int n = 0; n < SUM_TILES; n++) {
      fade[n] = *(const float2*)(m.fade + (sum_tile + n) * 8 + 2 * t);
      fades = fades || fade[n].x != 1.f || fade[n].y != 1.f;
    }
    if (any(fades))
      UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int n = 0; n < SUM_TILES; n++)
          UNROLL for (int e = 0; e < 4; e++) sum[i][n][e] *= e & 1 ? fade[n].y : fade[n].x;
    add_values(sum, m, value_ring + block % STAGES * ValueRows::STAGE, dim_part, sum_tile);
  }

  UNROLL for (int k = 0; k < KEY_TILES; k++)
    UNROLL for (int n = 0; n < SCORE_TILES; n++)
      UNROLL for (int c = 0; c < 2; c++) {
        float all = weight[k][n][c];
        UNROLL for (int mask = 4; mask < 32; mask *= 2) all += across(all, mask);
        if (g == 0) m.maxima[key_part * KEY_TILES + k][(score_tile + n) * 8 + 2 * t + c] = all;
      }
  const long long base = ((long long)unit * (SPLITS + 1) + split) * count + first_query;
  UNROLL for (int n = 0; n < SUM_TILES; n++)
    UNROLL for (int c = 0; c < 2; c++) {
      const int query = (sum_tile + n) * 8 + 2 * t + c;
      if (first_query + query < count) {
        float4* to = (float4*)(part_sum + (base + query) * D + dim_part * 64 + g * 8);
        to[0] = make_float4(sum[0][n][c], sum[0][n][c + 2], sum[1][n][c], sum[1][n][c + 2]);
        to[1] = make_float4(sum[2][n][c], sum[2][n][c + 2], sum[3][n][c], sum[3][n][c + 2]);
      }
    }
  __syncthreads();
  for (int i = thread; i < QUERIES; i += THREADS)
    if (first_query + i < count) {
      part_top[base + i] = m.tops[blocks & 1][i];
      part_weight[base + i] = ((m.maxima[0][i] + m.maxima[1][i]) + m.maxima[2][i]) + m.maxima[3][i];
    }
}
