// How a warp reads its weights from tiles (layout.py describes their order) and multiplies them; after pdl.cu, and before
// tiles.cu, which explains the macros, and before experts/experts.cu. BLOCK_TILES: 16-row tiles of a block, 8 unless given.
// UNIT: columns that a warp reads at a time, all or half of a tile's.

typedef unsigned char u8;

#ifndef BLOCK_TILES
#define BLOCK_TILES 8
#endif

constexpr int BLOCK_ROWS = 16 * BLOCK_TILES;
constexpr int TILES = TOKENS / 8;  // of the mma: fragments of sums of a warp, which has 16 rows
constexpr int LOW_BYTES = 2 * UNIT * LOW;
constexpr int HIGH_BYTES = 2 * UNIT * HIGH;
constexpr int SCALE_AT = LOW_BYTES + HIGH_BYTES;
constexpr int SCALE_BYTES = SCALES == 1 ? UNIT + 64 : SCALES == 2 ? UNIT + 32 : SCALES == 3 ? UNIT : SCALES == 4 ? 2 * UNIT : 0;
constexpr int TILE_BYTES = SCALE_AT + SCALE_BYTES;
constexpr int WEIGHT_BYTES = BLOCK_TILES * TILE_BYTES;
constexpr int X_BYTES = 2 * UNIT * TOKENS;
constexpr int STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
constexpr int THREADS = BLOCK_TILES * 32;
constexpr int SPANS = UNIT / 64;
constexpr int GROUPS = UNIT / 32;

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE uint4 load128(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
DEVICE uint2 load64(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
DEVICE u32 load32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a));
  return v;
}
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEVICE u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 add2(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
// Codes times one half of `s` plus one half of `m`, for both codes; selecting the half costs nothing.
template <int S, int M>
DEVICE u32 scaled(u32 codes, u32 s, u32 m) {
  u32 d;
  if (S == 0 && M == 0)
    asm("{.reg .b16 a,b,c,e; .reg .b32 s,m; mov.b32 {a,b},%2; mov.b32 {c,e},%3; mov.b32 s,{a,a}; mov.b32 m,{c,c}; fma.rn.f16x2 %0,%1,s,m;}"
        : "=r"(d) : "r"(codes), "r"(s), "r"(m));
  else if (S == 0)
    asm("{.reg .b16 a,b,c,e; .reg .b32 s,m; mov.b32 {a,b},%2; mov.b32 {c,e},%3; mov.b32 s,{a,a}; mov.b32 m,{e,e}; fma.rn.f16x2 %0,%1,s,m;}"
        : "=r"(d) : "r"(codes), "r"(s), "r"(m));
  else
    asm("{.reg .b16 a,b,c,e; .reg .b32 s,m; mov.b32 {a,b},%2; mov.b32 {c,e},%3; mov.b32 s,{b,b}; mov.b32 m,{e,e}; fma.rn.f16x2 %0,%1,s,m;}"
        : "=r"(d) : "r"(codes), "r"(s), "r"(m));
  return d;
}
DEVICE void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE u32 word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DEVICE u32 word(uint2 v, int i) { return i == 0 ? v.x : v.y; }
DEVICE void load_words(uint4& v, u32 a) { v = load128(a); }
DEVICE void load_words(uint2& v, u32 a) { v = load64(a); }
template <int BYTES>
struct Words {
  typedef uint4 type;
};
template <>
struct Words<8> {
  typedef uint2 type;
};

// Constants kept in registers: the compiler would otherwise spend a move on every use.
struct Constants {
  u32 magic, table[4];  // magic: bytes of 1024 and 64 in float16
  u32 selector;         // SCALES 2: the bytes of this lane's scales
};
DEVICE Constants constants(int lane) {
  Constants c;
  asm volatile("mov.b32 %0,0x5464;" : "=r"(c.magic));
#if SCALES == 2
  const u32 half = (lane & 3) >> 1;
  c.selector = half * 0x0101u + 0x0400u;
#endif
#if TABLE
  asm volatile("mov.b32 %0,%1;" : "=r"(c.table[0]) : "n"(TABLE0));
  asm volatile("mov.b32 %0,%1;" : "=r"(c.table[1]) : "n"(TABLE1));
  asm volatile("mov.b32 %0,%1;" : "=r"(c.table[2]) : "n"(TABLE2));
  asm volatile("mov.b32 %0,%1;" : "=r"(c.table[3]) : "n"(TABLE3));
#endif
  return c;
}

// A lane's share of a tile except the low bits, for its rows g and g + 8.
struct Tile {
#if SCALES == 1
  Words<UNIT / 16>::type pairs[2];
  u32 block[2], base[2], base16[2];
#elif SCALES == 2
  uint2 bytes[2];
  u32 block, block16;
#elif SCALES == 3 || SCALES == 4
  uint4 scale[GROUPS / 4];
#endif
#if SCALES == 4
  uint4 minimum[GROUPS / 4];
#endif
#if HIGH
  Words<HIGH_BYTES / 32>::type high;
#endif
};
DEVICE void load_tile(Tile& t, u32 at, int lane) {
  const int g = lane >> 2;
  const u32 s = at + SCALE_AT;
#if HIGH
  load_words(t.high, at + LOW_BYTES + lane * (HIGH_BYTES / 32));
#endif
#if SCALES == 1
  UNROLL for (int r = 0; r < 2; r++) {
    load_words(t.pairs[r], s + (g + 8 * r) * (UNIT / 16));
    t.block[r] = load32(s + UNIT + (g + 8 * r) * 4);
    t.base[r] = mul2(t.block[r], 0x0000e400u);    // (-1024 D, 0)
    t.base16[r] = mul2(t.block[r], 0x0000d400u);  // (-64 D, 0)
  }
#elif SCALES == 2
  UNROLL for (int r = 0; r < 2; r++) t.bytes[r] = load64(s + (g + 8 * r) * 8);
  t.block = load32(s + UNIT + g * 4);
  t.block16 = mul2(t.block, 0x2c002c00u);
#elif SCALES == 3 || SCALES == 4
  UNROLL for (int i = 0; i < GROUPS / 4; i++) t.scale[i] = load128(s + g * GROUPS * 4 + i * 16);
#endif
#if SCALES == 4
  UNROLL for (int i = 0; i < GROUPS / 4; i++) t.minimum[i] = load128(s + UNIT + g * GROUPS * 4 + i * 16);
#endif
}

// The A fragments of the two k16 steps in columns 64 j + 32 h and on: a[0..3], a[4..7].
DEVICE void weights(u32* a, const Tile& t, u32 at, uint4 low, int j, int h, int lane, const Constants& c) {
#if LOW == 16
  UNROLL for (int r = 0; r < 2; r++) {
    const uint4 v = load128(at + (2 * j + h) * 1024 + r * 512 + lane * 16);
    UNROLL for (int i = 0; i < 4; i++) a[2 * i + r] = word(v, i);
  }
#else
  constexpr bool NIBBLES = LOW == 4 && !TABLE;
  const bool upper = NIBBLES && h;  // the codes are 16 times too large
#if SCALES == 1
  // (1024 + scale, min * 2^-24) * (D, Dm) + (-1024 D, 0); for upper nibbles (64 + scale / 16, ..) and -64 D
  u32 s[2];
  UNROLL for (int r = 0; r < 2; r++)
    s[r] = fma2(permute(word(t.pairs[r], j), c.magic, h ? 0x6352 : 0x6140), t.block[r], h ? t.base16[r] : t.base[r]);
#elif SCALES == 2
  const u32 bytes = permute(j ? t.bytes[0].y : t.bytes[0].x, j ? t.bytes[1].y : t.bytes[1].x, c.selector + (h ? 0x0202u : 0u));
  const u32 s = mul2(add2((bytes & 0x00ff00ffu) | 0x64006400u, 0xe480e480u), upper ? t.block16 : t.block);
#elif SCALES == 3 || SCALES == 4
  u32 s = word(t.scale[(2 * j + h) >> 2], (2 * j + h) & 3);
  if (upper) s = mul2(s, 0x2c002c00u);
#endif
#if SCALES == 2 || SCALES == 3
  const u32 offset = 0x80008000u | ((upper ? 16 : 1) * OFFSET * 0x00010001u);
  const u32 m = mul2(s, offset);
#elif SCALES == 4
  const u32 m = mul2(word(t.minimum[(2 * j + h) >> 2], (2 * j + h) & 3), 0x04000400u);
#endif
#if TABLE
  uint4 values;
  UNROLL for (int i = 0; i < 4; i++) {
    const u32 nibbles = h ? word(low, i) >> 16 : word(low, i);
    const u32 index = nibbles & 0x7777u;
    const u32 first = permute(c.table[0], c.table[1], index), second = permute(c.table[2], c.table[3], index);
    (&values.x)[i] = permute(first, second, ((nibbles & 0x8888u) >> 1) | 0x3210u);
  }
  low = values;
#endif
  UNROLL for (int i = 0; i < 8; i++) {
    const int r = i & 1, p = (i >> 1) & 1;
    const u32 packed = word(low, 2 * r + (i >> 2));
    u32 v;
#if LOW == 8 || TABLE
    v = permute(packed, 0, p ? 0x4342 : 0x4140);
#else
    v = (p ? packed >> 8 : packed) & (h ? 0x00f000f0u : 0x000f000fu);
#if HIGH
    const u32 bits = HIGH == 1 ? word(t.high, j) : word(t.high, 2 * j + h);
    const int shift = (HIGH == 1 ? 8 * h + i : 2 * i) - (h ? 8 : 4);
    const u32 mask = (HIGH == 1 ? 0x00010001u : 0x00030003u) << (h ? 8 : 4);
    v |= (shift >= 0 ? bits >> (shift & 31) : bits << (-shift & 31)) & mask;
#endif
#endif
#if SCALES == 1
    a[i] = r ? scaled<0, 1>(v, s[1], s[1]) : scaled<0, 1>(v, s[0], s[0]);
#else
    a[i] = r ? scaled<1, 1>(v, s, m) : scaled<0, 0>(v, s, m);
#endif
  }
#endif
}

// The low bits of columns 64 j + 32 h and on; nibbles of both h are loaded together.
DEVICE uint4 load_low(u32 at, int j, int h, int lane) {
  return load128(at + (LOW == 4 ? j : 2 * j + h) * 512 + lane * 16);
}

#ifndef GROUPED
// One unit: `at` is this warp's tile in the stage, `xs` the stage's x. A fragment's two mma of 32 columns
// are apart, so that the second need not wait for the first. Returns bits of the last loads.
template <class Between>
DEVICE u32 multiply(float (&sums)[TILES][4], u32 at, u32 xs, int lane, const Constants& c, Between halfway) {
  constexpr int CHUNK = TILES % 4 == 0 ? 4 : TILES % 3 == 0 ? 3 : TILES;
  Tile t;
  load_tile(t, at, lane);
  const u32 mine = xs + lane * 16;
  u32 last = 0;
  UNROLL for (int j = 0; j < SPANS; j++) {
    uint4 low;
    UNROLL for (int h = 0; h < 2; h++) {
      u32 a[8];
      if (LOW == 8 || (LOW == 4 && h == 0)) low = load_low(at, j, h, lane);
      weights(a, t, at, low, j, h, lane, c);
      if (LOW == 16 && j == SPANS - 1 && h == 1) last |= a[6] | a[7];
      UNROLL for (int first = 0; first < TILES; first += CHUNK) {
        uint4 b[CHUNK];
        UNROLL for (int n = 0; n < CHUNK; n++) b[n] = load128(mine + (2 * j + h) * (TOKENS * 64) + (first + n) * 512);
        if (j == SPANS - 1 && h == 1) UNROLL for (int n = 0; n < CHUNK; n++) last |= b[n].w;
        UNROLL for (int n = 0; n < CHUNK; n++) mma(sums[first + n], a, b[n].x, b[n].y);
        UNROLL for (int n = 0; n < CHUNK; n++) mma(sums[first + n], a + 4, b[n].z, b[n].w);
      }
    }
    if (j == SPANS / 2 - 1) halfway();
    if (LOW < 16 && j == SPANS - 1) last |= low.w;
  }
  return last;
}
#endif
