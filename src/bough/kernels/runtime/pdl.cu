// What kernels with programmatic dependent launch (PDL) share; concatenated before their own files.
// OVERLAP: 1 where a kernel is launched before the previous one has ended (sm_90 and up).

typedef unsigned u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

// Allows the next kernel to start at once: it fetches what does not depend on this one, and then waits.
DEVICE void launch_dependents() {
#if OVERLAP
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the previous kernel has ended and its writes are visible.
DEVICE void wait_for_inputs() {
#if OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE float across(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
