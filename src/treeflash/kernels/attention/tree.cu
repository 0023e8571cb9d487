// Attention of a tree's rows over one split of a paged context (reference.py specifies it; triton_kernels.py merges the splits).
//
// No headers: NVRTC builds this file, after pages.cu, with no include path. Macros, given by cuda.py:
//   KEYS, VALUES  storage formats: 0 float16, 1 bfloat16, 2 q8_0, 3 q5_0, 4 q4_0, 5 tq3_0
//   QUERIES       of a block of the grid: nodes x query heads of one KV head, node-major; 8, 16, 24 or a multiple of 48
//   STAGES        of the rings of keys and of values      SHARED    bytes of shared memory     RESIDENT  blocks of an SM
//   SPLITS, SINKS, PAGE, WINDOW (0 or 1)                   FIRST0.., LAST0..  signs of the rotation, 32 in a word
//   LEVEL0..3     of tq3_0: low bytes, then high bytes, of eight float16
//   GROUPED       1: warp-group mma (sm_90a), by score_mma and sum_mma, which cuda.py generates before this file
//   OVERLAP       1: programmatic dependent launch (PDL), sm_90 and up
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
  float maxima[4][QUERIES];  // of parts of the keys; at the end the weights of the tiles of keys
  float tops[QUERIES];       // running maxima that shares are relative to; NONE: no key was visible yet
  float levels[QUERIES];     // the same as a finite number
  float limits[QUERIES];     // scores above these raise the maximum
  float fade[QUERIES];
  int oldest[QUERIES];       // first position inside a query's window
  int held[BLOCK];           // positions of the step's rows
  u64 seen[QUERIES];         // bit mask of the step's rows that a query attends to
  Tokens tokens[3];  // of block b at b modulo 3: those of two blocks are read while a third's are written
};
static_assert(SHARED == sizeof(Memory) + STAGES * (KeyRows::STAGE + ValueRows::STAGE), "SHARED");

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

// The block's queries, scaled, rotated where keys are, into shared memory. q: of its item and KV head.
DEVICE void load_queries(Memory& m, const float* q, float scale, int first, int count, int group, int stride) {
  constexpr int AHEAD = !WIDE ? 2 : GROUPED ? 3 : 4;
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
      // Must not be fused with the following sums in one variant and separate in another.
      UNROLL for (int i = 0; i < 8; i++) x[n][i] = __fmul_rn(x[n][i], scale);
      if (KeyRows::CODED) rotate(x[n], signs[0], signs[1], lane);
      const int query = start + n * WARPS;
      UNROLL for (int i = 0; i < 4; i++)
        *query_word(m, query, lane >> 2, lane & 3, i) = pack<KEYS>(x[n][2 * i], x[n][2 * i + 1]);
    }
  }
}

// Scores of the warp's keys, and of queries from first_tile * 8 on.
DEVICE void score(float (&s)[KEY_TILES][SCORE_TILES][4], Memory& m, const u8* stage, int key_part, int first_tile) {
  const int lane = own_number() & 31, row0 = key_part * (16 * KEY_TILES) + (lane >> 2);
#if GROUPED
  const u32 queries = of_warp(rows_at(m.queries + first_tile * 1024));
#else
  UNROLL for (int k = 0; k < KEY_TILES; k++)
    UNROLL for (int n = 0; n < SCORE_TILES; n++) UNROLL for (int e = 0; e < 4; e++) s[k][n][e] = 0.f;
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
    UNROLL for (int h = 0; h < 2; h++)
      score_mma(s[0][0], a[0][h], queries + ((j >> 1) * QUERIES * 128 + (2 * (j & 1) + h) * 32) / 16, j + h > 0);
    end_mma();
    wait_mma<1>();  // the previous group has read its operands
#else
    UNROLL for (int n = 0; n < SCORE_TILES; n++) {
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

// Values times shares; and a thread's weights, each over a quarter of the keys of a query.
DEVICE void add_values(float (&sum)[DIM_TILES][SUM_TILES][4], float (&weight)[WEIGHTS], Memory& m, const u8* stage,
                       int dim_part, int first_tile) {
  constexpr int WORDS = DIM_TILES / 2;
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
    const u32 shares = rows_at(m.shares) + step * 2;
    begin_mma();
    UNROLL for (int i = 0; i < DIM_TILES; i++) sum_mma(sum[i][0], a[i], shares, true);
    end_mma();
    wait_mma<1>();
#else
    UNROLL for (int n = 0; n < SUM_TILES; n++) {
      const uint2 b = *(const uint2*)share_word(m, (first_tile + n) * 8 + (lane >> 2), step, lane & 3);
      UNROLL for (int i = 0; i < DIM_TILES; i++) mma<VALUES>(sum[i][n], a[i], b.x, b.y);
    }
#endif
  }
  const int thread = own_number();
  UNROLL for (int i = 0; i < WEIGHTS; i++) {
    const int part = i * THREADS + thread;
    if (4 * QUERIES % THREADS == 0 || part < 4 * QUERIES) weight[i] += share_of(m, part >> 2, part & 3);
  }
#if GROUPED
  wait_mma<0>();
#endif
}

// A thread's tiles of S^T and O^T. A warp group's four warps have the four tiles of keys, and the same queries.
struct ThreadTiles {
  int g, t, key_part, score_tile, dim_part, sum_tile;
};
DEVICE ThreadTiles tiles_of(int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  return {lane >> 2, lane & 3, warp % KEY_PARTS, warp / KEY_PARTS * SCORE_TILES, warp % DIM_PARTS, warp / DIM_PARTS * SUM_TILES};
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
tree_attention(const float* q, const u8* key_codes, const u8* key_scales, const u8* value_codes, const u8* value_scales,
               const long long* table, const long long* lengths, const long long* ancestors, const long long* positions,
               float* part_top, float* part_weight, float* part_sum, int* active, float scale, int rows, int table_stride,
               int window, int kv_heads, int group, int tiles) {
  extern __shared__ __align__(1024) uint4 memory[];
  Memory& m = *(Memory*)memory;
  u8* key_ring = (u8*)(&m + 1);
  u8* value_ring = key_ring + STAGES * KeyRows::STAGE;
  launch_dependents();
  const int thread = threadIdx.x;
  const int tile = blockIdx.x % tiles, unit = blockIdx.x / tiles, item = unit / kv_heads, head = unit % kv_heads;
  // The step's own rows are the last split and start first; splits that a short context leaves empty come last.
  const int split = blockIdx.y == 0 ? SPLITS : blockIdx.y - 1;
  const bool own = split == SPLITS;
  const int length = (int)__ldcg(lengths + item), count = rows * group, first_query = tile * QUERIES;
  // A window's context is the first tokens and those in the root's window, from `low` on; other rows see no more.
  int sinks = length, low = length;
  if (WINDOW) {
    sinks = min(length, SINKS);
    low = max((max(length - window + 1, 0) >> 6) << 6, sinks);
  }
  // See _extent of triton_kernels.py.
  const int span = sinks + length - low;
  int size = max((span + SPLITS - 1) / SPLITS, min((span + SPLITS / 2 - 1) / (SPLITS / 2), 256));
  size = max((size + 63) / 64 * 64, 64);
  const int begin = own ? span : min(split * size, span), end = min(begin + size, span);
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

  // The context was written in an earlier step: no need to wait for the previous kernel.
  if (own) wait_for_inputs();
  int pages[STAGES + 2];
  UNROLL for (int i = 0; i < STAGES + 2; i++) pages[i] = page_of(i);
  // A group of copies: keys of a block and values of the previous one.
  UNROLL for (int i = 0; i < STAGES; i++) {
    if (i < blocks) fetch_keys(i, tokens_of(i, pages[i]));
    if (i && i <= blocks) fetch_values(i - 1, tokens_of(i - 1, pages[i - 1]));
    end_group();
  }
  if (thread == 0) UNROLL for (int i = STAGES - 1; i <= STAGES; i++) m.tokens[i % 3] = tokens_of(i, pages[i]);
  int ahead = pages[STAGES + 1];
  wait_for_inputs();
  if (own && head == 0 && tile == 0 && thread == 0) active[item] = (span + size - 1) / size;
  load_queries(m, q + ((long long)item * rows * kv_heads + head) * group * D, scale, first_query, count, group,
               kv_heads * group * D);
  for (int i = thread; i < QUERIES; i += THREADS) {
    const int node = (first_query + i) / group;
    const long long at = (long long)item * rows + node;
    m.tops[i] = m.limits[i] = NONE;
    m.levels[i] = 0.f;
    if (own) m.seen[i] = node < rows ? (u64)__ldcg(ancestors + at) : 0;
    if (WINDOW) m.oldest[i] = node < rows ? (int)__ldcg(positions + at) - window + 1 : 0;
  }
  if (WINDOW && own && thread < rows) m.held[thread] = (int)__ldcg(positions + (long long)item * rows + thread);
  wait_groups<STAGES - 1>();
  publish();
  __syncthreads();

  float sum[DIM_TILES][SUM_TILES][4], weight[WEIGHTS];
  UNROLL for (int i = 0; i < DIM_TILES; i++)
    UNROLL for (int n = 0; n < SUM_TILES; n++) UNROLL for (int e = 0; e < 4; e++) sum[i][n][e] = 0.f;
  UNROLL for (int i = 0; i < WEIGHTS; i++) weight[i] = 0.f;

  _Pragma("unroll 1") for (int block = 0; block < blocks; block++) {
    const auto [g, t, key_part, score_tile, dim_part, sum_tile] = tiles_of(own_number());
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
      UNROLL for (int i = 0; i < WEIGHTS; i++) weight[i] *= m.fade[min((i * THREADS + thread) / 4, QUERIES - 1)];
      UNROLL for (int n = 0; n < SUM_TILES; n++) {
        const float2 fade = *(const float2*)(m.fade + (sum_tile + n) * 8 + 2 * t);
        UNROLL for (int i = 0; i < DIM_TILES; i++)
          UNROLL for (int e = 0; e < 4; e++) sum[i][n][e] *= e & 1 ? fade.y : fade.x;
      }
    }
    if (block + STAGES <= blocks) fetch_values(block + STAGES - 1, m.tokens[(block + STAGES - 1) % 3]);
    if (block + STAGES < blocks) fetch_keys(block + STAGES, m.tokens[(block + STAGES) % 3]);
    end_group();
    if (thread == 0) {
      m.tokens[(block + STAGES + 1) % 3] = tokens_of(block + STAGES + 1, ahead);
      ahead = page_of(block + STAGES + 2);
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
    add_values(sum, weight, m, value_ring + block % STAGES * ValueRows::STAGE, dim_part, sum_tile);
  }

  UNROLL for (int i = 0; i < WEIGHTS; i++) {
    const int part = i * THREADS + thread;
    if (part < 4 * QUERIES) m.maxima[part & 3][part >> 2] = weight[i];
  }
  const auto [g, t, key_part, score_tile, dim_part, sum_tile] = tiles_of(own_number());
  const long long base = ((long long)unit * (SPLITS + 1) + split) * count + first_query;
  UNROLL for (int n = 0; n < SUM_TILES; n++)
    UNROLL for (int c = 0; c < 2; c++) {
      const int query = (sum_tile + n) * 8 + 2 * t + c;
      if (first_query + query < count) {
        float4* to = (float4*)(part_sum + (base + query) * D + (8 * dim_part + g) * (2 * DIM_TILES));
        UNROLL for (int i = 0; i < DIM_TILES; i += 2)
          to[i / 2] = make_float4(sum[i][n][c], sum[i][n][c + 2], sum[i + 1][n][c], sum[i + 1][n][c + 2]);
      }
    }
  __syncthreads();
  for (int i = thread; i < QUERIES; i += THREADS)
    if (first_query + i < count) {
      part_top[base + i] = m.tops[i];
      part_weight[base + i] = ((m.maxima[0][i] + m.maxima[1][i]) + m.maxima[2][i]) + m.maxima[3][i];
    }
}
