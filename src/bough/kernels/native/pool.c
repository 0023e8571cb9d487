// Threads of our own, which share out the items of a phase.
//
// A phase ends when its items are done, not when all threads have arrived: a thread that the system has taken
// off the CPU delays the others only if it holds an item, and finds no items when it comes back. Threads wait by
// spinning briefly, then yielding, then sleeping.
#define _GNU_SOURCE
#include "simd.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS = 4000, YIELDS = 64, MAX_THREADS = 256 };

struct Pool {
  int threads;
  _Alignas(64) atomic_uint job;      // number of the last job; workers wait for the next one
  _Alignas(64) atomic_uint phase;    // the current one, counted over all jobs
  _Alignas(64) _Atomic uint64_t ticket; // the current phase and its next item: phase << 32 | item
  _Alignas(64) atomic_int done;      // items of the current phase
  _Alignas(64) atomic_uint left;     // how often a worker has left a job
  atomic_int inside;                 // workers in the current job
  atomic_int open;                   // whether workers may join it
  _Alignas(64) atomic_int sleepers;
  Body *body;
  void *arg;
  unsigned first_phase;
  int stop;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  pthread_t thread[MAX_THREADS];
};

static void wait_for_change(Pool *pool, atomic_uint *word, unsigned seen) {
  for (int i = 0; i < SPINS; i++) {
    if (atomic_load_explicit(word, memory_order_acquire) != seen) return;
    _mm_pause();
  }
  for (int i = 0; i < YIELDS; i++) {
    if (atomic_load_explicit(word, memory_order_acquire) != seen) return;
    sched_yield();
  }
  pthread_mutex_lock(&pool->lock);
  atomic_fetch_add(&pool->sleepers, 1);
  while (atomic_load(word) == seen) pthread_cond_wait(&pool->wake, &pool->lock);
  atomic_fetch_sub(&pool->sleepers, 1);
  pthread_mutex_unlock(&pool->lock);
}

static void wake_sleepers(Pool *pool) {
  if (atomic_load(&pool->sleepers)) {
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
  }
}

// Counts the items that this thread holds as done; with the last one the phase ends.
static void finish_items(Worker *worker, int total) {
  Pool *pool = worker->pool;
  int held = worker->held;
  worker->held = 0;
  if (!held || atomic_fetch_add(&pool->done, held) + held < total) return;
  atomic_store(&pool->done, 0);
  atomic_store(&pool->ticket, (uint64_t)(worker->phase + 1) << 32);
  atomic_fetch_add(&pool->phase, 1);
  wake_sleepers(pool);
}

int claim(Worker *worker, int count, int total) {
  Pool *pool = worker->pool;
  finish_items(worker, total);
  uint64_t ticket = atomic_load(&pool->ticket);
  for (;;) {
    int next = (int)(uint32_t)ticket;
    if ((unsigned)(ticket >> 32) != worker->phase || next >= total) return total;
    int taken = total - next < count ? total - next : count;
    if (atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + (uint64_t)taken)) {
      worker->held = taken;
      return next;
    }
  }
}

void barrier(Worker *worker) {
  unsigned phase = worker->phase++;
  if (atomic_load(&worker->pool->phase) == phase) wait_for_change(worker->pool, &worker->pool->phase, phase);
}

int pool_threads(const Pool *pool) { return pool->threads; }

typedef struct { Pool *pool; int id; } Start;

static void *work(void *arg) {
  Start start = *(Start *)arg;
  Pool *pool = start.pool;
  free(arg);
  for (unsigned job = 0;;) {
    wait_for_change(pool, &pool->job, job);
    job = atomic_load(&pool->job);
    if (pool->stop) return NULL;
    atomic_fetch_add(&pool->inside, 1);
    if (atomic_load(&pool->open)) {  // the caller waits for those inside before it returns
      Worker worker = {pool, start.id, pool->first_phase, 0};
      pool->body(pool->arg, &worker);
    }
    atomic_fetch_sub(&pool->inside, 1);
    atomic_fetch_add(&pool->left, 1);
    wake_sleepers(pool);
  }
}

void pool_run(Pool *pool, Body *body, void *arg) {
  Worker worker = {pool, 0, atomic_load(&pool->phase), 0};
  pool->body = body;
  pool->arg = arg;
  pool->first_phase = worker.phase;
  atomic_store(&pool->open, 1);
  atomic_fetch_add(&pool->job, 1);
  wake_sleepers(pool);
  body(arg, &worker);
  atomic_store(&pool->open, 0);
  for (;;) {
    unsigned left = atomic_load(&pool->left);
    if (!atomic_load(&pool->inside)) return;
    wait_for_change(pool, &pool->left, left);
  }
}

void tf_pool_free(Pool *pool) {
  pool->stop = 1;
  atomic_fetch_add(&pool->job, 1);
  wake_sleepers(pool);
  for (int i = 1; i < pool->threads; i++) pthread_join(pool->thread[i], NULL);
  pthread_mutex_destroy(&pool->lock);
  pthread_cond_destroy(&pool->wake);
  free(pool);
}

// NULL if the system gives no memory; fewer threads than asked for if it gives no more.
Pool *tf_pool_new(int threads) {
  Pool *pool = aligned_alloc(64, (sizeof(Pool) + 63) / 64 * 64);
  if (!pool) return NULL;
  *pool = (Pool){.threads = 1};
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->wake, NULL);
  for (int i = 1; i < threads && i < MAX_THREADS; i++) {
    Start *start = malloc(sizeof *start);
    if (!start) break;
    *start = (Start){pool, i};
    if (pthread_create(&pool->thread[i], NULL, work, start)) {
      free(start);
      break;
    }
    pool->threads = i + 1;
  }
  return pool;
}

int tf_pool_threads(const Pool *pool) { return pool->threads; }

const char *tf_digest(void) { return DIGEST; }
