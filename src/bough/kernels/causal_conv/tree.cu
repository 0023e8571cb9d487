// The short convolution over a path and a tree, up to the delta rule's inputs (reference.py specifies it).
//
// No headers: NVRTC builds this file, after pdl.cu, with no include path. Macros, given by cuda.py:
//   HALF     1: window and stash hold float16, else float32
//   WARPS    of a block: many for one sequence, few where blocks of many sequences share an SM
//   OVERLAP  1: programmatic dependent launch (PDL), sm_90 and up
//
// A block owns the 128 channels of one head, so no other block uses its part of window and stash. A warp has whole
// rows, four channels a lane: a norm needs only its shuffles. All old inputs are read before the first is
// overwritten. Loads of activations go past L1, which may hold older values: with PDL this kernel starts before they
// are written.

typedef unsigned short u16;

constexpr int D = 128;
constexpr int TAPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int MOST_ROWS = 64;

DEVICE u32 to_half2(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE float2 from_half2(u32 x) {
  float2 y;
  asm("{.reg .b16 a,b; mov.b32 {a,b},%2; cvt.f32.f16 %0,a; cvt.f32.f16 %1,b;}" : "=f"(y.x), "=f"(y.y) : "r"(x));
  return y;
}

// Four channels as window and stash hold them.
#if HALF
typedef uint2 Saved;
typedef u16 Stored;
DEVICE Saved save(float4 x) { return Saved{to_half2(x.x, x.y), to_half2(x.z, x.w)}; }
DEVICE float4 value_of(Saved x) {
  const float2 a = from_half2(x.x), b = from_half2(x.y);
  return make_float4(a.x, a.y, b.x, b.y);
}
#else
typedef float4 Saved;
typedef float Stored;
DEVICE Saved save(float4 x) { return x; }
DEVICE float4 value_of(Saved x) { return x; }
#endif

DEVICE float silu(float x) { return x / (1.f + expf(-x)); }

// The indices of the inputs of row n of [path, tree].
DEVICE void find_inputs(int* taps_at, const long long* index, long long first, int n, int before, int end, int length) {
  if (n >= end) return;
  const long long* from = index + (first + (n < before ? n : n - before + length)) * TAPS;
  UNROLL for (int tap = 0; tap < TAPS; tap++) taps_at[tap] = (int)from[tap];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tree_conv(
    const float* inputs, const float* alpha, const float* beta, const float* weight, const float* decay,
    const float* bias, Stored* window, Stored* stash, float* gates, const long long* slots,
    const long long* path, const long long* count, const long long* index, const long long* begins, float* q, float* k, float* v,
    float* g_out, float* beta_out, long long input_stride, long long alpha_stride, long long beta_stride,
    int rows, int length, int saved, int key_heads, int value_heads, float eps, float scale) {
  launch_dependents();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x;
  const long long item = blockIdx.y, slot = slots[item];
  const int taken = (int)count[item], channels = (2 * key_heads + value_heads) * D;
  const int channel = head * D + 4 * lane;
  const bool is_query = head < key_heads, is_value = head >= 2 * key_heads;
  const int own_head = is_value ? head - 2 * key_heads : is_query ? head : head - key_heads;
  const long long begin = begins ? begins[item] : item * rows, first = item * length + begin;
  if (begins && !(rows = (int)(begins[item + 1] - begin))) return;
  Stored* old = window + slot * (TAPS - 1) * channels + channel;
  Stored* left = stash + slot * saved * channels + channel;
  const long long* chosen = path + item * length;

  float4 factors[4];  // of the lane's channels: their taps
  UNROLL for (int i = 0; i < 4; i++) factors[i] = ((const float4*)weight)[channel + i];
  // The new window: the last inputs of [old window, path].
  Saved moved;
  if (warp < TAPS - 1) {
    const int from = taken + warp;
    moved = *(const Saved*)(from < TAPS - 1 ? old + from * channels
                                           : left + chosen[from - (TAPS - 1)] * (long long)channels);
  }
  // A query is not needed after its step.
  const int before = is_query ? 0 : taken;
  int taps_at[TAPS];
  find_inputs(taps_at, index, first, warp, before, before + rows, length);
  wait_for_inputs();

  Saved fresh[MOST_ROWS / WARPS];  // inputs that go to the stash
  UNROLL for (int n = 0; n < MOST_ROWS / WARPS; n++) {
    const int row = n * WARPS + warp;
    if (row < rows) fresh[n] = save(__ldcg((const float4*)(inputs + (begin + row) * input_stride + channel)));
  }
  const int own_row = threadIdx.x;
  const bool gated = is_value && own_row < rows;
  float gate = 0, strength = 0;
  if (gated) {
    gate = __ldcg(alpha + (begin + own_row) * alpha_stride + own_head) + bias[own_head];
    gate = decay[own_head] * (gate > 20.f ? gate : log1pf(expf(gate)));
    strength = 1.f / (1.f + expf(-__ldcg(beta + (begin + own_row) * beta_stride + own_head)));
  }

  for (int n = warp; n < before + rows; n += WARPS) {
    const bool in_tree = n >= before;
    const int row = n - before, joined = in_tree ? length + row : n;
    float mixed[4] = {0, 0, 0, 0};
    UNROLL for (int tap = 0; tap < TAPS; tap++) {
      const int at = taps_at[tap];
      float4 x;
      if (at >= TAPS - 1 + length) {
        const float* from = inputs + (begin + at - (TAPS - 1) - length) * input_stride + channel;
        x = value_of(save(__ldcg((const float4*)from)));
      } else {
        x = value_of(*(const Saved*)(at < TAPS - 1 ? old + at * channels
                                                  : left + chosen[at - (TAPS - 1)] * (long long)channels));
      }
      const float values[4] = {x.x, x.y, x.z, x.w};
      UNROLL for (int i = 0; i < 4; i++) {
        const float taps[4] = {factors[i].x, factors[i].y, factors[i].z, factors[i].w};
        mixed[i] = fmaf(values[i], taps[tap], mixed[i]);
      }
    }
    find_inputs(taps_at, index, first, n + WARPS, before, before + rows, length);
    UNROLL for (int i = 0; i < 4; i++) mixed[i] = silu(mixed[i]);
    if (!is_value) {
      float length_ = __fmul_rn(mixed[0], mixed[0]);
      UNROLL for (int i = 1; i < 4; i++) length_ = fmaf(mixed[i], mixed[i], length_);
      UNROLL for (int mask = 16; mask; mask >>= 1) length_ = __fadd_rn(length_, across(length_, mask));
      const float times = __fmul_rn(rsqrtf(__fadd_rn(length_, eps)), is_query ? scale : 1.f);
      UNROLL for (int i = 0; i < 4; i++) mixed[i] *= times;
    }
    float* to = is_query   ? q + ((begin + row) * key_heads + own_head) * D
                : is_value ? v + ((first + joined) * value_heads + own_head) * D
                           : k + ((first + joined) * key_heads + own_head) * D;
    ((float4*)to)[lane] = make_float4(mixed[0], mixed[1], mixed[2], mixed[3]);
    if (is_value && !in_tree && lane == 0) {
      const long long source = (slot * saved + chosen[n]) * 2 * value_heads + own_head;
      const long long unit = (first + n) * value_heads + own_head;
      g_out[unit] = gates[source];
      beta_out[unit] = gates[source + value_heads];
    }
  }
  __syncthreads();  // all reads of old rows are done

  if (rows && warp < TAPS - 1) *(Saved*)(old + warp * channels) = moved;
  UNROLL for (int n = 0; n < MOST_ROWS / WARPS; n++) {
    const int row = n * WARPS + warp;
    if (row < rows) *(Saved*)(left + row * (long long)channels) = fresh[n];
  }
  if (gated) {
    const long long unit = (first + length + own_row) * value_heads + own_head;
    const long long kept = (slot * saved + own_row) * 2 * value_heads + own_head;
    g_out[unit] = gate;
    beta_out[unit] = strength;
    gates[kept] = gate;
    gates[kept + value_heads] = strength;
  }
}
