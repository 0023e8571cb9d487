// Instructions, and the copies of KV pages to shared memory and from there, decoded, to registers; concatenated after
// pdl.cu and before tree.cu, whose macros it uses.

typedef unsigned char u8;

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Copies past L1; bytes after the first `given` become zeros.
DEVICE void copy16(void* to, const void* from, int given) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared_address(to)), "l"(from), "r"(given) : "memory");
}
// Four bytes can only be copied through L1: not those of rows that the previous kernel has just written, nor of others in
// the same 32 bytes.
DEVICE void copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],4;" ::"r"(shared_address(to)), "l"(from) : "memory");
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
// The two numbers of a word.
template <int STORED>
DEVICE float low_of(u32 x) {
  float y;
  if (STORED == 1) return __uint_as_float(x << 16);
  asm("{.reg .b16 a,b; mov.b32 {a,b},%1; cvt.f32.f16 %0,a;}" : "=f"(y) : "r"(x));
  return y;
}
template <int STORED>
DEVICE float high_of(u32 x) {
  float y;
  if (STORED == 1) return __uint_as_float(x & 0xffff0000u);
  asm("{.reg .b16 a,b; mov.b32 {a,b},%1; cvt.f32.f16 %0,b;}" : "=f"(y) : "r"(x));
  return y;
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
// A value that is equal in all lanes, which the compiler cannot see by itself.
DEVICE u32 of_warp(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }
// The low half of the descriptor of a warp group's second operand, in 16 bytes; the other half is in cuda.py.
DEVICE u32 rows_at(const void* p) { return shared_address(p) >> 4 | 1u << 16; }
DEVICE void begin_mma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_mma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void wait_mma() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Makes stores to shared memory visible to the warp groups' mma after the next barrier.
DEVICE void publish() {
#if GROUPED
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

constexpr int D = 256;
constexpr int BLOCK = 64;  // keys at a time; a page holds a multiple of them
constexpr bool WIDE = QUERIES >= 48;
constexpr int WARPS = !WIDE ? 4 : GROUPED ? 8 : 12;
constexpr int THREADS = 32 * WARPS;
constexpr float SLACK = 8;  // shares are float16: 2^8 of 2^16
#define NONE __uint_as_float(0xff800000u)  // minus infinity

// How WARPS_ warps divide S^T [4 tiles of keys][TILES] and O^T [16 tiles of dims][TILES] of QUERIES_ queries.
template <int QUERIES_, int WARPS_, bool TEAM_>
struct Division {
  static constexpr bool TEAM = TEAM_;  // four of the block's warps, which have a row's queries
  static constexpr int COUNT = QUERIES_, TILES = QUERIES_ / 8, WARPS = WARPS_, THREADS = 32 * WARPS_;
  static constexpr int KEY_PARTS = WARPS_ > 4 && !GROUPED ? 2 : 4;
  static constexpr int KEY_TILES = 4 / KEY_PARTS;
  static constexpr int SCORE_TILES = TILES * KEY_PARTS / WARPS_;
  static constexpr int SCORE_STEPS = WARPS_ > 4 && !GROUPED ? 2 : D / 32;  // unrolled: registers
  static constexpr int DIM_PARTS = GROUPED ? WARPS_ : 4;
  static constexpr int DIM_TILES = 16 / DIM_PARTS;
  static constexpr int SUM_TILES = TILES * DIM_PARTS / WARPS_;
  static constexpr int WEIGHTS = (4 * QUERIES_ + THREADS - 1) / THREADS;  // parts of queries' weights that a thread holds
  static_assert(SCORE_TILES * WARPS_ == TILES * KEY_PARTS && SUM_TILES * WARPS_ == TILES * DIM_PARTS, "QUERIES");
};
typedef Division<QUERIES, WARPS, false> Tile;
typedef Division<8, 4, true> Team;
constexpr int TEAMS = WARPS / 4 < STAGES ? WARPS / 4 : STAGES;  // of a block; each has a stage of the rings

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

// The offset of 16 bytes number `part` of a row: lanes of one access must use different banks. FLAT: 16 bytes of two rows (floats
// as keys) are read at a time; else 8 or 4 bytes of four rows, or 16 of four rows with fewer lanes each.
template <int MAIN, bool FLAT>
DEVICE int offset_of(int row, int part) {
  const int turned = FLAT ? part ^ ((row & 1) << 2) : MAIN == 64 ? part ^ (row & 2) : part ^ ((row & 3) << 1);
  return row * MAIN + turned * 16;
}

// PARTS times 16 bytes of the BLOCK rows of the pool from `first` on, from byte `from` of a row on.
template <int BYTES, int PARTS, class Offset>
DEVICE void fetch_plane(const u8* codes, int from, long long first, Offset target) {
  constexpr int STEP = THREADS / PARTS;
  static_assert(THREADS % PARTS == 0 && STEP % 4 == 0, "offsets of rows STEP apart differ by a constant");
  const int thread = own_number(), row0 = thread / PARTS, part = thread % PARTS;
  const u8* source = codes + (first + row0) * BYTES + from + part * 16;
  u8* to = target(row0, part);
  const int apart = (int)(target(row0 + 4, part) - to) / 4;
  UNROLL for (int n = 0; n < (BLOCK + STEP - 1) / STEP; n++) {
    if (BLOCK % STEP && n * STEP + row0 >= BLOCK) break;
    copy16(to + n * STEP * apart, source + n * STEP * BYTES, 16);
  }
}
template <int STORED, bool FLAT>
DEVICE void fetch(u8* stage, const u8* codes, const u8* scales, long long first) {
  typedef Rows<STORED> R;
  fetch_plane<R::BYTES, R::MAIN / 16>(codes, 0, first,
                                      [&](int row, int part) { return stage + offset_of<R::MAIN, FLAT>(row, part); });
  if (R::BITS)
    fetch_plane<R::BYTES, 2>(codes, R::MAIN, first,
                             [&](int row, int part) { return stage + BLOCK * R::MAIN + row * 32 + part * 16; });
  const int row = own_number();
  if (R::CODED && row < BLOCK) {
    u8* to = stage + BLOCK * R::BYTES + row * R::SCALES;
    const u8* from = scales + (first + row) * R::SCALES;
    if (R::SCALES == 16) copy16(to, from, 16);
    else copy4(to, from);
  }
}

// The same by one team: row r of the stage is row rows[r] of the pool, zeros where that is negative.
template <int BYTES, int PARTS, class Offset>
DEVICE void gather_plane(const u8* codes, int from, const int* rows, Offset target) {
  constexpr int STEP = Team::THREADS / PARTS;
  const int thread = own_number() % Team::THREADS, part = thread % PARTS;
  UNROLL for (int n = 0; n < (BLOCK + STEP - 1) / STEP; n++) {
    const int row = n * STEP + thread / PARTS, source = rows[row];
    copy16(target(row, part), codes + (long long)max(source, 0) * BYTES + from + part * 16, source < 0 ? 0 : 16);
  }
}
template <int STORED, bool FLAT>
DEVICE void gather(u8* stage, const u8* codes, const u8* scales, const int* rows) {
  typedef Rows<STORED> R;
  gather_plane<R::BYTES, R::MAIN / 16>(codes, 0, rows,
                                       [&](int row, int part) { return stage + offset_of<R::MAIN, FLAT>(row, part); });
  if (R::BITS)
    gather_plane<R::BYTES, 2>(codes, R::MAIN, rows,
                              [&](int row, int part) { return stage + BLOCK * R::MAIN + row * 32 + part * 16; });
  const int row = own_number() % Team::THREADS;
  if (R::CODED && row < BLOCK) {
    u8* to = stage + BLOCK * R::BYTES + row * R::SCALES;
    const u8* from = scales + (long long)max(rows[row], 0) * R::SCALES;
    if (R::SCALES == 16) copy16(to, from, rows[row] < 0 ? 0 : 16);
    else *(u32*)to = rows[row] < 0 ? 0 : __ldcg((const u32*)from);
  }
}

// 4 * WORDS dims of a row as float16 (or bfloat16), two a word, before their scale; from dim 4 * quad on.
template <int STORED, bool FLAT, int WORDS>
DEVICE void dims_of(u32* halves, const u8* stage, int row, int quad) {
  typedef Rows<STORED> R;
  if (!R::CODED) {
    const u8* at = stage + offset_of<R::MAIN, FLAT>(row, quad >> 1);
    if (WORDS == 2) {
      const uint4 found = *(const uint4*)at;
      halves[0] = found.x, halves[1] = found.y, halves[2] = found.z, halves[3] = found.w;
    } else {
      const uint2 found = *(const uint2*)(at + (quad & 1) * 8);
      halves[0] = found.x, halves[1] = found.y;
    }
    return;
  }
  constexpr int WIDTH = R::MAIN / 4;  // quads side by side in the first plane
  const int beside = quad % WIDTH;
  const u8* first = stage + offset_of<R::MAIN, FLAT>(row, beside >> 2) + (beside & 3) * 4;
  const u8* second = stage + BLOCK * R::MAIN + row * R::BITS + quad % 8 * 4;
  u32 main[2], bits[2] = {0, 0};
  if (WORDS == 2) {
    const uint2 found = *(const uint2*)first;
    main[0] = found.x, main[1] = found.y;
    if (R::BITS) bits[0] = ((const uint2*)second)->x, bits[1] = ((const uint2*)second)->y;
  } else {
    main[0] = *(const u32*)first;
    if (R::BITS) bits[0] = *(const u32*)second;
  }
  UNROLL for (int i = 0; i < WORDS; i++) {
    u32 code = main[i];
    if (STORED == 2) code ^= 0x80808080u;
    if (STORED == 3 || STORED == 4) code = (code >> (quad / WIDTH * 4)) & 0x0f0f0f0fu;
    if (STORED == 5) code = (code >> (quad / WIDTH * 2)) & 0x03030303u;
    if (R::BITS) code |= ((bits[i] >> (quad / 8)) & 0x01010101u) << (STORED == 3 ? 4 : 2);
    if (STORED == 5) {
      const u32 choice = permute(code | code >> 4, 0, 0x4420);  // a code in each of four nibbles
      const u32 low = permute(LEVEL0, LEVEL1, choice), high = permute(LEVEL2, LEVEL3, choice);
      halves[2 * i] = permute(low, high, 0x5140);
      halves[2 * i + 1] = permute(low, high, 0x7362);
    } else {
      // float16 of 1024 + code has the code in its last bits.
      constexpr u32 ZERO = STORED == 2 ? 0x64806480u : STORED == 3 ? 0x64106410u : 0x64086408u;
      halves[2 * i] = sub2(permute(code, 0x64646464u, 0x4140), ZERO);
      halves[2 * i + 1] = sub2(permute(code, 0x64646464u, 0x4342), ZERO);
    }
  }
}
template <int STORED>
DEVICE u32 scale_of(const u8* stage, int row, int quad) {
  typedef Rows<STORED> R;
  return *(const unsigned short*)(stage + BLOCK * R::BYTES + row * R::SCALES + (STORED == 5 ? quad / 32 : quad / 8) * 2);
}
