// Rows of tiles to int8, with a scale for each row and group of 128 columns; concatenated after weights.cu.

// Of the lane that differs in the bits of `mask`.
DEVICE float across(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float lower(u32 pair) {
  float y;
  asm("{.reg .b16 a,b; mov.b32 {a,b},%1; cvt.f32.f16 %0,a;}" : "=f"(y) : "r"(pair));
  return y;
}
DEVICE float upper(u32 pair) { return lower(pair >> 16); }
// The nearest integer of a value within +-127, in the lowest byte.
DEVICE u32 rounded(float x) { return __float_as_uint(x + 12582912.0f) & 255u; }

// Where codes of row and column, and on, are: in rows, or in tiles (`Int8Matrix.tiled`).
DEVICE size_t place(int row, int column, int columns, int padded, int tiled) {
  if (!tiled) return (size_t)row * columns + column;
  const size_t tile = (size_t)(column / 128) * (padded / 128) + row / 128;
  return tile * 16384 + (row % 128) * 128 + ((column % 128 / 16) ^ (row % 8)) * 16 + column % 16;
}

// One warp a tile; codes [padded, depth * UNIT], scales [depth * UNIT / 128, padded].
extern "C" __global__ void __launch_bounds__(256, 2)
requantise(const u8* __restrict__ w, const float* __restrict__ row_scale, u8* __restrict__ codes, float* __restrict__ scales,
           int first_tile, int tiles, int all_tiles, int depth, int padded, int tiled) {
  __shared__ __align__(128) u8 buffer[BLOCK_TILES * TILE_BYTES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = blockIdx.x * BLOCK_TILES + warp, step = blockIdx.y;
  if (tile >= tiles) return;
  const u8* from = w + ((size_t)step * all_tiles + first_tile + tile) * TILE_BYTES;
  for (int o = lane * 16; o < TILE_BYTES; o += 512) *(uint4*)(buffer + warp * TILE_BYTES + o) = *(const uint4*)(from + o);
  __syncwarp();
  asm volatile("" ::: "memory");
  const u32 at = shared_address(buffer) + warp * TILE_BYTES;
  const Constants c = constants(lane);
  const int g = lane >> 2;
  Tile t;
  load_tile(t, at, lane);
  UNROLL for (int group = 0; group < UNIT / 128; group++) {
    u32 a[4][8];
    UNROLL for (int part = 0; part < 4; part += 2) {
      const int j = 2 * group + part / 2;
      uint4 low;
      UNROLL for (int h = 0; h < 2; h++) {
        if (LOW == 8 || (LOW == 4 && h == 0)) low = load_low(at, j, h, lane);
        weights(a[part + h], t, at, low, j, h, lane, c);
      }
    }
    UNROLL for (int r = 0; r < 2; r++) {
      float peak = 0;
      UNROLL for (int part = 0; part < 4; part++)
        UNROLL for (int i = 0; i < 4; i++)
          peak = fmaxf(peak, fmaxf(fabsf(lower(a[part][2 * i + r])), fabsf(upper(a[part][2 * i + r]))));
      peak = fmaxf(peak, across(peak, 1));
      peak = fmaxf(peak, across(peak, 2));
      const float times = peak > 0 ? 127 / peak : 0;
      const int row = tile * 16 + g + 8 * r;
      if ((lane & 3) == 0)
        scales[(size_t)(step * (UNIT / 128) + group) * padded + row] = peak * (1.0f / 127) * row_scale[first_tile * 16 + row];
      UNROLL for (int part = 0; part < 4; part++) {
        u32 word[2] = {0, 0};
        UNROLL for (int i = 0; i < 4; i++) {
          const u32 pair = a[part][2 * i + r];
          word[i / 2] |= (rounded(lower(pair) * times) | rounded(upper(pair) * times) << 8) << 16 * (i % 2);
        }
        uint2 both;
        both.x = word[0], both.y = word[1];
        const int column = step * UNIT + group * 128 + part * 32 + (lane & 3) * 8;
        *(uint2*)(codes + place(row, column, depth * UNIT, padded, tiled)) = both;
      }
    }
  }
}
