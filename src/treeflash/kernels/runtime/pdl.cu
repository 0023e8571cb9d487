// What kernels of several files begin with, those that may start early among them; stands before their own files.
// OVERLAP: 1 where they are launched before the kernel in front of them has ended (sm_90 and up).

typedef unsigned u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

// The next kernel may start at once: it fetches what does not depend on this one, and then waits itself.
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
DEVICE float across(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
