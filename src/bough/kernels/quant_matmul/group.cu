// `multiply` by warp-group mma, which only Hopper has; after weights.cu and the generated group_mma. GROUPED: 1.
//
// Four warps hold 64 rows of weights in registers, as they do for mma.m16n8k16, and one instruction reads x from shared
// memory for all of them: a quarter of the reads. x is in groups of eight columns (rows.py), where a descriptor finds the
// halves of a k16 step: 8 rows x 16 bytes are contiguous, then the next 8 rows, and after all rows the next group.

// The lower half of a descriptor: where x begins, and how far one group of eight columns is from the next.
DEVICE u32 descriptor(u32 address) { return TOKENS << 16 | (address >> 4 & 0x3fff); }
DEVICE void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N of the groups of mma that were committed last are running.
template <int N>
DEVICE void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// As in weights.cu. All reads of the stage have ended when it returns.
template <class Between>
DEVICE u32 multiply(float (&sums)[TILES][4], u32 at, u32 xs, int lane, const Constants& c, Between halfway) {
  Tile t;
  load_tile(t, at, lane);
  const u32 x = descriptor(xs);
  u32 a[2][8];
  uint4 low;
  UNROLL for (int j = 0; j < SPANS; j++) {
    UNROLL for (int h = 0; h < 2; h++) {
      if (LOW == 8 || (LOW == 4 && h == 0)) low = load_low(at, j, h, lane);
      if (j) group_wait<1>();  // the mma before the last have read these registers
      weights(a[h], t, at, low, j, h, lane, c);
      group_fence();
      group_mma(&sums[0][0], a[h], x + (2 * j + h) * (4 * TOKENS), 1);
      group_mma(&sums[0][0], a[h] + 4, x + (2 * j + h) * (4 * TOKENS) + 2 * TOKENS, 1);
      group_commit();
    }
    if (j == SPANS / 2 - 1) halfway();
  }
  group_wait<0>();
  return 0;
}
