// Packs rows of activations in the order that tiles.cu reads; after pdl.cu. No headers.

// x [tokens, x_stride] float32 to float16, each row times the power of two that scales its largest magnitude into
// [2^14, 2^15), and the inverses. Column k of row m goes to (k / 32) * group_stride + m * row_stride + k % 32; with a
// row_stride of 8 to groups of eight columns, see rows.py.
// Loads go past L1, which may hold older values than x: with PDL this kernel starts before x is written.
extern "C" __global__ void __launch_bounds__(512)
pack_rows(const float* __restrict__ x, unsigned short* __restrict__ out, float* __restrict__ scale, long long x_stride, int columns,
          int padded, long long group_stride, long long row_stride) {
  launch_dependents();
  wait_for_inputs();
  __shared__ float peaks[16];
  const int m = blockIdx.x;
  const float* row = x + m * x_stride;
  float peak = 0.f;
  const bool wide = columns % 4 == 0 && ((size_t)row & 15) == 0;
  if (wide) {
    for (int k = threadIdx.x * 4; k < columns; k += 2048) {
      const float4 v = __ldcg((const float4*)(row + k));
      peak = fmaxf(peak, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
  } else {
    for (int k = threadIdx.x; k < columns; k += 512) peak = fmaxf(peak, fabsf(__ldcg(row + k)));
  }
  UNROLL for (int o = 16; o; o >>= 1) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, o));
  if ((threadIdx.x & 31) == 0) peaks[threadIdx.x >> 5] = peak;
  __syncthreads();
  UNROLL for (int i = 0; i < 16; i++) peak = fmaxf(peak, peaks[i]);
  // Exponents of float32; a row of zeroes or subnormals keeps the largest factor, an infinity stays one.
  int exponent = (int)((__float_as_uint(peak) >> 23) & 255);
  exponent = exponent < 16 ? 16 : exponent > 254 ? 254 : exponent;
  const float times = __uint_as_float((u32)(127 + 14 + 127 - exponent) << 23), inverse = __uint_as_float((u32)(exponent - 14) << 23);
  if (threadIdx.x == 0) scale[m] = inverse;
  unsigned short* to = out + m * row_stride;
  for (int k = threadIdx.x * 4; k < padded; k += 2048) {
    float v[4];
    if (wide && k < columns) {
      *(float4*)v = __ldcg((const float4*)(row + k));
    } else {
      UNROLL for (int i = 0; i < 4; i++) v[i] = k + i < columns ? __ldcg(row + k + i) : 0.f;
    }
    uint2 halves;
    asm("{.reg .f32 a,b; mul.f32 a,%1,%3; mul.f32 b,%2,%3; cvt.rn.f16x2.f32 %0,b,a;}" : "=r"(halves.x) : "f"(v[0]), "f"(v[1]), "f"(times));
    asm("{.reg .f32 a,b; mul.f32 a,%1,%3; mul.f32 b,%2,%3; cvt.rn.f16x2.f32 %0,b,a;}" : "=r"(halves.y) : "f"(v[2]), "f"(v[3]), "f"(times));
    unsigned short* at = to + (size_t)(k >> 5) * group_stride;
    if (row_stride == 8) {
      u32* pair = (u32*)(at + (k & 4) / 2 * (group_stride / 4) + (k & 31) / 8 * 2);
      pair[0] = halves.x, pair[group_stride / 8] = halves.y;
    } else {
      *(uint2*)(at + (k & 31)) = halves;
    }
  }
}
