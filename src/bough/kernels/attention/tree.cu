// Attention of tree rows over a paged context (reference.py specifies it; triton_kernels.py merges the partial results).
//
// No headers: NVRTC builds this file, after pages.cu, with no include path. Macros, given by cuda.py:
//   KEYS, VALUES  storage formats: 0 float16, 1 bfloat16, 2 q8_0, 3 q5_0, 4 q4_0, 5 tq3_0
//   QUERIES       of a tile: rows x query heads of one KV head, row-major; 8, 16, 24 or a multiple of 48
//   STAGES        of the rings of keys and of values      SHARED    bytes of shared memory     RESIDENT  blocks of an SM
//   SPLITS, SPLITS0, SPLITS1, TIER0, TIER1                 the number of splits: see splits_of
//   SINKS, PAGE, WINDOW (0 or 1)                           FIRST0.., LAST0..  signs of the rotation, 32 in a word
//   LEVEL0..3     of tq3_0: low bytes, then high bytes, of eight float16
//   GROUPED       1: warp-group mma (sm_90a), by score_mma and sum_mma (of a tile), team_score_mma and team_sum_mma, which
//                 cuda.py generates before this file
//   OVERLAP       1: programmatic dependent launch (PDL), sm_90 and up
//
// A row's bits depend on its path alone: its position p and the keys and values at positions 0 to p, not on which of them are
// committed, nor on the other rows. Block n is positions 64 n to 64 n + 63, and a key's place in an instruction is its position
// modulo 64. With b = p / 64, the partial results of a query are
//   - splits: blocks up to b - 2. Split n modulo S has block n; S depends on b alone. A split goes through its blocks in order,
//     with running maxima;
//   - block b - 1 (slot SPLITS) and block b (slot SPLITS + 1), each by itself.
// The merge adds them in this order. A tree has at most 64 rows, so all of a row's ancestors that are not committed are in its
// last two blocks; `length` committed tokens fill the blocks before length / 64, the root's block. So
//   - splits, and block b - 1 of the rows in the root's block, are committed: whole tiles of rows share their keys and values;
//   - all other last blocks are assembled in order of position for one row at a time, from the committed tokens and the row's
//     ancestors, by a team of four warps, with the same instructions.
// A masked key has a share of 0 and adds nothing; an absent one is a row of zeros.
//
// Keys, and then dims of values, are the 16-row operand of mma.m16n8k16: S^T = K Q^T and O^T = V^T P^T, so queries are
// padded to 8 and codes go from shared memory into a fragment's registers. Which dim or key is in which row or column of
// a fragment is free. A lane reads neighbouring dims of one token:
//   keys: 8 dims from 32 j + 8 t on (t = lane % 4) of tokens g and g + 8 (g = lane / 4) are its share of two steps of 16 dims;
//   values: rows g and g + 8 of its warp's tiles are 2 dims a tile; columns are tokens 16 k + {0, 8, 4, 12} + t.
// Warp groups take the same fragments from registers, and queries and shares from shared memory: rows of 128 bytes, 16 bytes
// number p of row r at p ^ (r & 7).
// The order of a query's sums does not depend on QUERIES or on other queries.

struct __align__(GROUPED ? 1024 : 128) Memory {
  u8 queries[QUERIES * D * 2];
  u8 shares[QUERIES * BLOCK * 2];
  long long bases[4];        // first pool rows of blocks, block i at i modulo 3: two are read while a third is written
  float maxima[4][QUERIES];  // of parts of the keys; at the end the weights of the tiles of keys
  float tops[QUERIES];       // running maxima that shares are relative to; NONE: no key was visible yet
  float levels[QUERIES];     // the same as a finite number
  float limits[QUERIES];     // scores above these raise the maximum
  float fade[QUERIES];
  int oldest[QUERIES];       // first position inside a query's window
  int last[QUERIES];         // last block that a query's partial result includes; below 0: it has none
  int sources[3][BLOCK];     // pool rows of the block that a team has assembled; -1: absent
};
static_assert(SHARED == sizeof(Memory) + STAGES * (KeyRows::STAGE + ValueRows::STAGE), "SHARED");
static_assert(SINKS == BLOCK, "the first block is never outside of a window");

// The addresses of a query's dims 32 j + 8 t + 2 i and the next, and of the shares of keys 16 * step + pair and + 8: in the
// order in which mma reads its second operand, and such that the lanes of one access use different banks.
DEVICE u32* query_word(Memory& m, int query, int j, int t, int i) {
  if (!GROUPED) return (u32*)m.queries + (((query >> 3) * (D / 32) + j) * 32 + (query & 7) * 4 + t) * 4 + i;
  const int part = 4 * (j & 1) + i;
  return (u32*)m.queries + ((j >> 1) * QUERIES + query) * 32 + (part ^ (query & 7)) * 4 + t;
}
DEVICE u32* share_word(Memory& m, int query, int step, int pair) {
  if (GROUPED) return (u32*)m.shares + query * 32 + ((2 * step + (pair >> 2)) ^ (query & 7)) * 4 + (pair & 3);
  const int in_tile = query & 7, slot = (in_tile * 4 + (pair & 3)) ^ (in_tile >> 2 << 2);
  return (u32*)m.shares + (((query >> 3) * 4 + step) * 32 + slot) * 2 + (pair >> 2);
}

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

// Queries first to first + COUNT - 1 of the `count` of a sequence and KV head, whose first is at q, scaled, rotated where keys
// are, into shared memory from number `base` on.
template <class S>
DEVICE void load_queries(Memory& m, const float* q, float scale, int first, int count, int group, int stride, int base) {
  constexpr int AHEAD = S::WARPS == 4 ? 2 : GROUPED ? 3 : 4;
  static_assert(S::COUNT % (S::WARPS * AHEAD) == 0, "QUERIES");
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % S::WARPS;
  const u32 words[8] = {FIRST0, FIRST1, FIRST2, FIRST3, LAST0, LAST1, LAST2, LAST3};
  u32 signs[2] = {0, 0};
  UNROLL for (int i = 0; i < 4; i++)
    UNROLL for (int k = 0; k < 2; k++)
      if ((lane >> 2 & 3) == i) signs[k] = words[4 * k + i] >> (lane & 3) * 8;
  _Pragma("unroll 1") for (int start = warp; start < S::COUNT; start += S::WARPS * AHEAD) {
    float x[AHEAD][8];
    UNROLL for (int n = 0; n < AHEAD; n++) {
      const int query = first + start + n * S::WARPS;
      const float4* from = (const float4*)(q + (long long)(query / group) * stride + query % group * D) + 2 * lane;
      float4 low = make_float4(0, 0, 0, 0), high = low;
      if (query < count) low = __ldcg(from), high = __ldcg(from + 1);
      x[n][0] = low.x, x[n][1] = low.y, x[n][2] = low.z, x[n][3] = low.w;
      x[n][4] = high.x, x[n][5] = high.y, x[n][6] = high.z, x[n][7] = high.w;
    }
    UNROLL for (int n = 0; n < AHEAD; n++) {
      // Must not be fused with the following sums in one variant and separate in another.
      UNROLL for (int i = 0; i < 8; i++) x[n][i] = __fmul_rn(x[n][i], scale);
      if (KeyRows::CODED) rotate(x[n], signs[0], signs[1], lane);
      const int query = base + start + n * S::WARPS;
      UNROLL for (int i = 0; i < 4; i++)
        *query_word(m, query, lane >> 2, lane & 3, i) = pack<KEYS>(x[n][2 * i], x[n][2 * i + 1]);
    }
  }
}

// Scores of the warp's keys, and of queries from first_tile * 8 on.
template <class S>
DEVICE void score(float (&s)[S::KEY_TILES][S::SCORE_TILES][4], Memory& m, const u8* stage, int key_part, int first_tile) {
  constexpr int KEY_TILES = S::KEY_TILES, SCORE_STEPS = S::SCORE_STEPS;
  const int lane = own_number() & 31, row0 = key_part * (16 * KEY_TILES) + (lane >> 2);
#if GROUPED
  const u32 queries = of_warp(rows_at(m.queries + first_tile * 1024));
#else
  UNROLL for (int k = 0; k < KEY_TILES; k++)
    UNROLL for (int n = 0; n < S::SCORE_TILES; n++) UNROLL for (int e = 0; e < 4; e++) s[k][n][e] = 0.f;
#endif
  _Pragma("unroll SCORE_STEPS") for (int j = 0; j < D / 32; j++) {
    u32 a[KEY_TILES][2][4];
    UNROLL for (int k = 0; k < KEY_TILES; k++)
      UNROLL for (int r = 0; r < 2; r++) {
        const int row = row0 + 16 * k + 8 * r;
        u32 halves[4];
        dims_of<KEYS, !KeyRows::CODED, 2>(halves, stage, row, 8 * j + 2 * (lane & 3));
        if (KeyRows::CODED) {
          const u32 scale = permute(scale_of<KEYS>(stage, row, 8 * j), 0, 0x1010);
          UNROLL for (int i = 0; i < 4; i++) halves[i] = mul2(halves[i], scale);
        }
        UNROLL for (int i = 0; i < 4; i++) a[k][i >> 1][2 * (i & 1) + r] = halves[i];
      }
#if GROUPED
    begin_mma();
    UNROLL for (int h = 0; h < 2; h++) {
      const u32 at = queries + ((j >> 1) * QUERIES * 128 + (2 * (j & 1) + h) * 32) / 16;
      if (S::TEAM) team_score_mma(s[0][0], a[0][h], at, j + h > 0);
      else score_mma(s[0][0], a[0][h], at, j + h > 0);
    }
    end_mma();
    wait_mma<1>();  // the previous group has read its operands
#else
    UNROLL for (int n = 0; n < S::SCORE_TILES; n++) {
      const uint4 b = *(const uint4*)query_word(m, (first_tile + n) * 8 + (lane >> 2), j, lane & 3, 0);
      UNROLL for (int k = 0; k < KEY_TILES; k++) mma<KEYS>(s[k][n], a[k][0], b.x, b.y);
      UNROLL for (int k = 0; k < KEY_TILES; k++) mma<KEYS>(s[k][n], a[k][1], b.z, b.w);
    }
#endif
  }
#if GROUPED
  wait_mma<0>();
#endif
}

// Adds the shares of 16 keys of a query, as they are multiplied.
DEVICE float share_of(Memory& m, int query, int step) {
  float all = 0.f;
  UNROLL for (int pair = 0; pair < 8; pair++) {
    const u32 both = *share_word(m, query, step, pair);
    all += low_of<VALUES>(both) + high_of<VALUES>(both);
  }
  return all;
}

// Values times shares; and a thread's weights, each over a quarter of the keys of a query. base: the first query.
template <class S>
DEVICE void add_values(float (&sum)[S::DIM_TILES][S::SUM_TILES][4], float (&weight)[S::WEIGHTS], Memory& m, const u8* stage,
                       int dim_part, int first_tile, int base) {
  constexpr int DIM_TILES = S::DIM_TILES, WORDS = DIM_TILES / 2;
  const int lane = own_number() & 31, quad = (8 * dim_part + (lane >> 2)) * WORDS;
  UNROLL for (int step = 0; step < 4; step++) {
    u32 a[DIM_TILES][4];
    UNROLL for (int pair = 0; pair < 2; pair++) {
      const int row = 16 * step + 4 * pair + (lane & 3);
      u32 one[DIM_TILES], other[DIM_TILES];
      dims_of<VALUES, false, WORDS>(one, stage, row, quad);
      dims_of<VALUES, false, WORDS>(other, stage, row + 8, quad);
      u32 scales = 0;
      if (ValueRows::CODED) scales = scale_of<VALUES>(stage, row, quad) | scale_of<VALUES>(stage, row + 8, quad) << 16;
      UNROLL for (int i = 0; i < DIM_TILES; i++)
        UNROLL for (int r = 0; r < 2; r++) {
          const u32 both = permute(one[i], other[i], r ? 0x7632 : 0x5410);
          a[i][2 * pair + r] = ValueRows::CODED ? mul2(both, scales) : both;
        }
    }
#if GROUPED
    const u32 shares = rows_at(m.shares + base * 128) + step * 2;
    begin_mma();
    UNROLL for (int i = 0; i < DIM_TILES; i++) {
      if (S::TEAM) team_sum_mma(sum[i][0], a[i], shares, true);
      else sum_mma(sum[i][0], a[i], shares, true);
    }
    end_mma();
    wait_mma<1>();
#else
    UNROLL for (int n = 0; n < S::SUM_TILES; n++) {
      const uint2 b = *(const uint2*)share_word(m, (first_tile + n) * 8 + (lane >> 2), step, lane & 3);
      UNROLL for (int i = 0; i < DIM_TILES; i++) mma<VALUES>(sum[i][n], a[i], b.x, b.y);
    }
#endif
  }
  const int thread = own_number() % S::THREADS;
  UNROLL for (int i = 0; i < S::WEIGHTS; i++) {
    const int part = i * S::THREADS + thread;
    if (4 * S::COUNT % S::THREADS == 0 || part < 4 * S::COUNT) weight[i] += share_of(m, base + (part >> 2), part & 3);
  }
#if GROUPED
  wait_mma<0>();
#endif
}

// Stores the sums of queries base to base + count - 1, those whose partial result exists, from row `to` of part_sum on.
template <class S>
DEVICE void store_sums(const float (&sum)[S::DIM_TILES][S::SUM_TILES][4], const Memory& m, float* part_sum, long long to,
                       int base, int count, int dim_part, int first_tile) {
  const int lane = own_number() & 31, g = lane >> 2, t = lane & 3;
  UNROLL for (int n = 0; n < S::SUM_TILES; n++)
    UNROLL for (int c = 0; c < 2; c++) {
      const int query = (first_tile + n) * 8 + 2 * t + c - base;
      if (query < count && (S::TEAM || m.last[query] >= 0)) {
        float4* row = (float4*)(part_sum + (to + query) * D + (8 * dim_part + g) * (2 * S::DIM_TILES));
        UNROLL for (int i = 0; i < S::DIM_TILES; i += 2)
          row[i / 2] = make_float4(sum[i][n][c], sum[i][n][c + 2], sum[i + 1][n][c], sum[i + 1][n][c + 2]);
      }
    }
}

// A thread's tiles of S^T and O^T. A warp group's four warps have the four tiles of keys, and the same queries.
struct ThreadTiles {
  int g, t, key_part, score_tile, dim_part, sum_tile;
};
DEVICE ThreadTiles tiles_of(int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  return {lane >> 2, lane & 3,
          warp % Tile::KEY_PARTS, warp / Tile::KEY_PARTS * Tile::SCORE_TILES,
          warp % Tile::DIM_PARTS, warp / Tile::DIM_PARTS * Tile::SUM_TILES};
}

struct Arguments {
  const float* q;
  const u8 *key_codes, *key_scales, *value_codes, *value_scales;
  const long long *table, *lengths, *first, *ancestors;
  float *part_top, *part_weight, *part_sum;
  int* active;
  float scale;
  int rows, sequences, table_stride, window, kv_heads, group;
};

// How many splits a row in this block has.
DEVICE int splits_of(int block) { return block <= TIER0 ? SPLITS0 : block <= TIER1 ? SPLITS1 : SPLITS; }

// Rows of a sequence: `count` from row `first` of the step on.
struct SequenceRows {
  int first, count;
};
DEVICE SequenceRows rows_of(const Arguments& a, int item) {
  if (a.first == nullptr) return {a.rows / a.sequences * item, a.rows / a.sequences};
  const int first = (int)__ldcg(a.first + item);
  return {first, (int)__ldcg(a.first + item + 1) - first};
}

// A sequence of the step, and its rows.
struct Sequence {
  int item;
  SequenceRows rows;
};

// The first sequence, in order, whose rows `reached` counts up to more than `wanted`; `wanted` is then counted from its
// first on. item < 0: none. A lane looks at one sequence at a time, so that a warp waits for memory once.
template <class Reached>
DEVICE Sequence sequence_of(const Arguments& a, int& wanted, Reached reached) {
  if (a.first == nullptr) {
    const int each = a.rows / a.sequences, size = reached(each), item = wanted / size;
    wanted -= item * size;
    return {item < a.sequences ? item : -1, {each * item, each}};
  }
  const int lane = threadIdx.x & 31;
  for (int start = 0; start < a.sequences; start += 32) {
    const int own = start + lane;
    const SequenceRows rows = own < a.sequences ? rows_of(a, own) : SequenceRows{0, 0};
    const int size = own < a.sequences ? reached(rows.count) : 0;
    int end = size;
    UNROLL for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end, distance);
      if (lane >= distance) end += before;
    }
    const u32 found = __ballot_sync(0xffffffffu, end > wanted);
    const int chosen = found ? __ffs(found) - 1 : 31;
    wanted -= __shfl_sync(0xffffffffu, end - (found ? size : 0), chosen);
    const int first = __shfl_sync(0xffffffffu, rows.first, chosen), count = __shfl_sync(0xffffffffu, rows.count, chosen);
    if (found) return {start + chosen, {first, count}};
  }
  return {-1, {0, 0}};
}

DEVICE int longest_of(const Arguments& a) {
  if (a.sequences == 1) return (int)__ldcg(a.lengths);
  int longest = 0;
  for (int item = threadIdx.x & 31; item < a.sequences; item += 32) longest = max(longest, (int)__ldcg(a.lengths + item));
  UNROLL for (int mask = 1; mask < 32; mask *= 2) longest = max(longest, __shfl_xor_sync(0xffffffffu, longest, mask));
  return longest;
}

// Whether a row is in the block after the root's.
DEVICE int leaves_block(const Arguments& a, SequenceRows rows, int length) {
  const int held = length % BLOCK;
  int longest = 0;
  if (held + rows.count > BLOCK)
    for (int row = threadIdx.x % 32; row < rows.count; row += 32)
      longest = max(longest, __popcll(__ldcg(a.ancestors + rows.first + row)));
  return __any_sync(0xffffffffu, held + longest > BLOCK);
}

// The committed blocks of one slot of a tile's partial results: a split, or the block before the root's.
// The blocks are the first one where a window has left out some after it, then every `stride`-th from `start` on.
struct Blocks {
  int sink, start, stride, count;
  DEVICE int operator[](int i) const { return i < sink ? 0 : start + (i - sink) * stride; }
};
DEVICE Blocks blocks_of(int split, int stride, int last, int oldest) {
  int start = split;
  if (WINDOW && oldest > start) start += (oldest - start + stride - 1) / stride * stride;
  const int sink = split == 0 && start > 0 && last >= 0;
  return {sink, start, stride, sink + (start <= last ? (last - start) / stride + 1 : 0)};
}

// One tile of queries over the blocks of one slot.
DEVICE void add_committed(const Arguments& a, Memory& m, u8* key_ring, u8* value_ring, Sequence sequence, int tile, int head,
                          int slot) {
  constexpr int KEY_TILES = Tile::KEY_TILES, SCORE_TILES = Tile::SCORE_TILES, DIM_TILES = Tile::DIM_TILES,
                SUM_TILES = Tile::SUM_TILES, WEIGHTS = Tile::WEIGHTS, KEY_PARTS = Tile::KEY_PARTS;
  const int thread = threadIdx.x, group = a.group;
  const auto [item, rows] = sequence;
  const int length = (int)__ldcg(a.lengths + item), root = length / BLOCK;
  const int count = rows.count * group, first_query = tile * QUERIES;
  if (slot < SPLITS && slot >= root) return;
  const int deep = leaves_block(a, rows, length);
  const int two = deep && splits_of(root) != splits_of(root + 1);
  const int uneven = two ? 0 : deep ? root - 1 : 1 << 30;  // the first block that some rows have and some do not
  // Positions from here on are in the root's window; other rows see no more.
  const int oldest = WINDOW ? max(length - a.window + 1, 0) / BLOCK : 0;
  const long long* table = a.table + (long long)item * a.table_stride;

  // Twice where rows in the root's block and in the next have different numbers of splits.
  _Pragma("unroll 1") for (int pass = 0; pass <= (slot < SPLITS && two); pass++) {
    const int splits = splits_of(root + pass);
    Blocks blocks = {0, root - 1, 1, 1};
    if (slot < SPLITS) {
      if (slot >= splits) continue;
      const int last = root - 2 + (two ? pass : deep);
      if (slot > last) continue;
      blocks = blocks_of(slot, splits, last, oldest);
    } else if (root == 0) {
      continue;
    }
    auto page_of = [&](int i) { return i < blocks.count ? (int)__ldcg(table + blocks[i] * BLOCK / PAGE) : 0; };
    auto base_of = [&](int i, int page) { return ((long long)page * a.kv_heads + head) * PAGE + blocks[i] * BLOCK % PAGE; };
    auto fetch_keys = [&](int i, long long base) {
      fetch<KEYS, !KeyRows::CODED>(key_ring + i % STAGES * KeyRows::STAGE, a.key_codes, a.key_scales, base);
    };
    auto fetch_values = [&](int i, long long base) {
      fetch<VALUES, false>(value_ring + i % STAGES * ValueRows::STAGE, a.value_codes, a.value_scales, base);
    };

    // Lengths, ancestors, page table and committed tokens are older than the previous kernel: no need to wait for it.
    int pages[STAGES + 2];
    UNROLL for (int i = 0; i < STAGES + 2; i++) pages[i] = page_of(i);
    // A group of copies: keys of a block and values of the previous one.
    UNROLL for (int i = 0; i < STAGES; i++) {
      if (i < blocks.count) fetch_keys(i, base_of(i, pages[i]));
      if (i && i <= blocks.count) fetch_values(i - 1, base_of(i - 1, pages[i - 1]));
      end_group();
    }
    if (thread == 0) UNROLL for (int i = STAGES - 1; i <= STAGES; i++) m.bases[i % 3] = base_of(i, pages[i]);
    int ahead = pages[STAGES + 1];
    wait_for_inputs();
    load_queries<Tile>(m, a.q + ((long long)rows.first * a.kv_heads + head) * group * D, a.scale, first_query, count, group,
                       a.kv_heads * group * D, 0);
    for (int i = thread; i < QUERIES; i += THREADS) {
      const int row = (first_query + i) / group;
      const int position = row < rows.count ? length + __popcll(__ldcg(a.ancestors + rows.first + row)) - 1 : 0;
      const int own = position / BLOCK;
      m.tops[i] = m.limits[i] = NONE;
      m.levels[i] = 0.f;
      m.oldest[i] = position - a.window + 1;
      m.last[i] = row >= rows.count ? -1
                  : slot == SPLITS  ? (own == root ? root - 1 : -1)
                                    : (splits_of(own) == splits ? own - 2 : -1);
    }
    wait_groups<STAGES - 1>();
    publish();
    __syncthreads();

    float sum[DIM_TILES][SUM_TILES][4], weight[WEIGHTS];
    UNROLL for (int i = 0; i < DIM_TILES; i++)
      UNROLL for (int n = 0; n < SUM_TILES; n++) UNROLL for (int e = 0; e < 4; e++) sum[i][n][e] = 0.f;
    UNROLL for (int i = 0; i < WEIGHTS; i++) weight[i] = 0.f;

    _Pragma("unroll 1") for (int i = 0; i < blocks.count; i++) {
      const auto [g, t, key_part, score_tile, dim_part, sum_tile] = tiles_of(own_number());
      float s[KEY_TILES][SCORE_TILES][4];
      score<Tile>(s, m, key_ring + i % STAGES * KeyRows::STAGE, key_part, score_tile);
      const int block = blocks[i];
      if ((WINDOW && block > 0) || block >= uneven) {
        UNROLL for (int n = 0; n < SCORE_TILES; n++)
          UNROLL for (int c = 0; c < 2; c++) {
            const int query = (score_tile + n) * 8 + 2 * t + c;
            const bool has = block <= m.last[query];
            const int from = WINDOW && block > 0 ? m.oldest[query] - block * BLOCK : 0;
            UNROLL for (int k = 0; k < KEY_TILES; k++)
              UNROLL for (int e = c; e < 4; e += 2) {
                const int key = (key_part * KEY_TILES + k) * 16 + 8 * (e >> 1) + g;
                s[k][n][e] = has && key >= from ? s[k][n][e] : NONE;
              }
          }
      }
      bool exceeds = false;
      UNROLL for (int n = 0; n < SCORE_TILES; n++) {
        const float2 limit = *(const float2*)(m.limits + (score_tile + n) * 8 + 2 * t);
        UNROLL for (int k = 0; k < KEY_TILES; k++)
          exceeds |= (fmaxf(s[k][n][0], s[k][n][2]) > limit.x) | (fmaxf(s[k][n][1], s[k][n][3]) > limit.y);
      }
      // All warps are done with these keys and the previous values. New maxima are rare: a maximum stays while no score exceeds
      // it by SLACK, which depends on the query's own scores alone, not on the other queries of this block.
      if (__syncthreads_or(exceeds)) {
        UNROLL for (int n = 0; n < SCORE_TILES; n++)
          UNROLL for (int c = 0; c < 2; c++) {
            float top = fmaxf(s[0][n][c], s[0][n][c + 2]);
            UNROLL for (int k = 1; k < KEY_TILES; k++) top = fmaxf(top, fmaxf(s[k][n][c], s[k][n][c + 2]));
            UNROLL for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, across(top, mask));
            if (g == 0) m.maxima[key_part][(score_tile + n) * 8 + 2 * t + c] = top;
          }
        __syncthreads();
        if (thread < QUERIES) {
          float top = m.maxima[0][thread];
          UNROLL for (int k = 1; k < KEY_PARTS; k++) top = fmaxf(top, m.maxima[k][thread]);
          const bool moves = top > m.limits[thread];
          m.fade[thread] = moves ? power_of_two(m.tops[thread] - top) : 1.f;
          if (moves) m.tops[thread] = m.levels[thread] = top, m.limits[thread] = top + SLACK;
        }
        __syncthreads();
        // Must not be fused with the following sums in one variant and separate in another.
        UNROLL for (int i = 0; i < WEIGHTS; i++)
          weight[i] = __fmul_rn(weight[i], m.fade[min((i * THREADS + thread) / 4, QUERIES - 1)]);
        UNROLL for (int n = 0; n < SUM_TILES; n++) {
          const float2 fade = *(const float2*)(m.fade + (sum_tile + n) * 8 + 2 * t);
          UNROLL for (int i = 0; i < DIM_TILES; i++)
            UNROLL for (int e = 0; e < 4; e++) sum[i][n][e] *= e & 1 ? fade.y : fade.x;
        }
      }
      if (i + STAGES <= blocks.count) fetch_values(i + STAGES - 1, m.bases[(i + STAGES - 1) % 3]);
      if (i + STAGES < blocks.count) fetch_keys(i + STAGES, m.bases[(i + STAGES) % 3]);
      end_group();
      if (thread == 0) {
        m.bases[(i + STAGES + 1) % 3] = base_of(i + STAGES + 1, ahead);
        ahead = page_of(i + STAGES + 2);
      }

      UNROLL for (int n = 0; n < SCORE_TILES; n++) {
        const int query = (score_tile + n) * 8 + 2 * t;
        const float2 level = *(const float2*)(m.levels + query);
        float p[KEY_TILES][4];
        UNROLL for (int k = 0; k < KEY_TILES; k++) {
          UNROLL for (int e = 0; e < 4; e++) p[k][e] = power_of_two(s[k][n][e] - (e & 1 ? level.y : level.x));
        }
        UNROLL for (int k = 0; k < KEY_TILES; k++)
          UNROLL for (int c = 0; c < 2; c++)
            *share_word(m, query + c, key_part * KEY_TILES + k, g) = pack<VALUES>(p[k][c], p[k][c + 2]);
      }
      wait_groups<STAGES - 1>();
      publish();
      __syncthreads();  // shares, these values and the next keys are ready
      add_values<Tile>(sum, weight, m, value_ring + i % STAGES * ValueRows::STAGE, dim_part, sum_tile, 0);
    }

    UNROLL for (int i = 0; i < WEIGHTS; i++) {
      const int part = i * THREADS + thread;
      if (part < 4 * QUERIES) m.maxima[part & 3][part >> 2] = weight[i];
    }
    const auto [g, t, key_part, score_tile, dim_part, sum_tile] = tiles_of(own_number());
    const long long to = ((long long)head * (SPLITS + 2) + slot) * a.rows * group + rows.first * group + first_query;
    if (blocks.count > 0) store_sums<Tile>(sum, m, a.part_sum, to, 0, count - first_query, dim_part, sum_tile);
    __syncthreads();
    for (int i = thread; i < QUERIES; i += THREADS)
      if (first_query + i < count && m.last[i] >= 0) {
        a.part_top[to + i] = m.tops[i];
        a.part_weight[to + i] = ((m.maxima[0][i] + m.maxima[1][i]) + m.maxima[2][i]) + m.maxima[3][i];
      }
    __syncthreads();
  }
}

// The four warps of a team wait for each other.
DEVICE void team_barrier(int team) { asm volatile("bar.sync %0,%1;" ::"r"(team + 1), "n"(Team::THREADS) : "memory"); }

// The last blocks of a row that hold rows of the tree, for eight of its query heads.
DEVICE void add_assembled(const Arguments& a, Memory& m, u8* key_ring, u8* value_ring, int work, int team) {
  const int lane = own_number() & 31, warp = own_number() / 32 % Team::WARPS, thread = 32 * warp + lane;
  const int g = lane >> 2, t = lane & 3;
  const int group = a.group, parts = (group + 7) / 8, base = 8 * team;
  const int head = work % a.kv_heads, part = work / a.kv_heads % parts, row = work / a.kv_heads / parts;
  if (row >= a.rows) return;
  int number = row;
  const auto [item, rows] = sequence_of(a, number, [](int count) { return count; });
  if (item < 0) return;
  const int first_row = rows.first, length = (int)__ldcg(a.lengths + item), root = length / BLOCK;
  const u64 seen = (u64)__ldcg(a.ancestors + row);
  const int position = length + __popcll(seen) - 1, own = position / BLOCK;
  const int count = min(8, group - 8 * part);
  const long long* table = a.table + (long long)item * a.table_stride;
  auto pool_row = [&](int index) { return ((int)__ldcg(table + index / PAGE) * a.kv_heads + head) * PAGE + index % PAGE; };
  int* sources = m.sources[team];
  u8 *keys = key_ring + team * KeyRows::STAGE, *values = value_ring + team * ValueRows::STAGE;

  // Blocks are assembled from the last one on; there are two only where that is not the root's.
  _Pragma("unroll 1") for (int block = own; block >= root; block--) {
    const long long to = ((long long)head * (SPLITS + 2) + SPLITS + 1 - (own - block)) * a.rows * group + row * group + 8 * part;
    // Row r of the tree is at index length + r; the ancestors' order is that of their positions.
    if (thread < BLOCK) {
      const int at = block * BLOCK + thread;
      if (at < length || at > position) sources[thread] = at < length ? pool_row(at) : -1;
    } else {
      const int other = thread - BLOCK, at = length + __popcll(seen & ((1ull << other) - 1));
      if ((seen >> other & 1) && at / BLOCK == block) sources[at % BLOCK] = pool_row(length + other);
    }
    team_barrier(team);
    if (block == own) wait_for_inputs();
    gather<KEYS, !KeyRows::CODED>(keys, a.key_codes, a.key_scales, sources);
    end_group();
    gather<VALUES, false>(values, a.value_codes, a.value_scales, sources);
    end_group();
    if (block == own) {
      const float* q = a.q + (((long long)row * a.kv_heads + head) * group + 8 * part) * D;
      load_queries<Team>(m, q, a.scale, 0, count, group, 0, base);
      if (head == 0 && part == 0 && thread == 0) a.active[row] = min(splits_of(own), max(own - 1, 0));
      if (own == 0 && thread < count) a.part_top[to - (long long)a.rows * group + thread] = NONE;
    }
    wait_groups<1>();
    publish();
    team_barrier(team);

    float s[1][1][4];
    score<Team>(s, m, keys, warp, team);
    UNROLL for (int e = 0; e < 4; e++) {
      const int key = 16 * warp + 8 * (e >> 1) + g, at = block * BLOCK + key;
      const bool visible = at <= position && (!WINDOW || at < SINKS || at > position - a.window);
      s[0][0][e] = visible ? s[0][0][e] : NONE;
    }
    UNROLL for (int c = 0; c < 2; c++) {
      float top = fmaxf(s[0][0][c], s[0][0][c + 2]);
      UNROLL for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, across(top, mask));
      if (g == 0) m.maxima[warp][base + 2 * t + c] = top;
    }
    team_barrier(team);
    auto top_of = [&](int query) {
      const float low = fmaxf(m.maxima[0][base + query], m.maxima[1][base + query]);
      return fmaxf(low, fmaxf(m.maxima[2][base + query], m.maxima[3][base + query]));
    };
    UNROLL for (int c = 0; c < 2; c++) {
      const float top = top_of(2 * t + c), level = top == NONE ? 0.f : top;
      const u32 shares = pack<VALUES>(power_of_two(s[0][0][c] - level), power_of_two(s[0][0][c + 2] - level));
      *share_word(m, base + 2 * t + c, warp, g) = shares;
    }
    wait_groups<0>();
    publish();
    team_barrier(team);
    float sum[Team::DIM_TILES][1][4], weight[1] = {0.f};
    UNROLL for (int i = 0; i < Team::DIM_TILES; i++) UNROLL for (int e = 0; e < 4; e++) sum[i][0][e] = 0.f;
    add_values<Team>(sum, weight, m, values, warp, team, base);

    store_sums<Team>(sum, m, a.part_sum, to, base, count, warp, team);
    if (warp == 0) {
      float quarters[4];
      UNROLL for (int i = 0; i < 4; i++) quarters[i] = __shfl_sync(0xffffffffu, weight[0], (lane & ~3) + i);
      if (t == 0 && g < count) {
        a.part_top[to + g] = top_of(g);
        a.part_weight[to + g] = ((quarters[0] + quarters[1]) + quarters[2]) + quarters[3];
      }
    }
    team_barrier(team);
  }
}

// The grid: tiles x KV heads for the block before the root's and for each split that has blocks in the longest sequence; teams;
// blocks that a short context leaves without work. A loop over the splits of a tile would need fewer, but ptxas of CUDA 13 fails
// to allocate registers for it with quantised caches.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
tree_attention(const Arguments a, int tiles, int team_blocks) {
  extern __shared__ __align__(1024) uint4 memory[];
  Memory& m = *(Memory*)memory;
  u8* key_ring = (u8*)(&m + 1);
  u8* value_ring = key_ring + STAGES * KeyRows::STAGE;
  launch_dependents();
  const int root = longest_of(a) / BLOCK, units = tiles * a.kv_heads;
  const int number = blockIdx.x - (min(splits_of(root + 1), root) + 1) * units;
  if (number >= 0) {
    const int team = threadIdx.x / Team::THREADS;
    if (number < team_blocks && team < TEAMS) add_assembled(a, m, key_ring, value_ring, number * TEAMS + team, team);
    return;
  }
  int tile = blockIdx.x % units / a.kv_heads;
  const int group = a.group;
  const Sequence sequence =
      sequence_of(a, tile, [group](int count) { return (count * group + QUERIES - 1) / QUERIES; });
  if (sequence.item < 0) return;
  const int turn = blockIdx.x / units;
  add_committed(a, m, key_ring, value_ring, sequence, tile, blockIdx.x % a.kv_heads, turn == 0 ? SPLITS : turn - 1);
}
