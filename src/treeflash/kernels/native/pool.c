// Threads of our own: they share out items of a phase, and wait by spinning briefly, yielding, then sleeping.
#define _GNU_SOURCE
#include "native.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS = 4000, YIELDS = 64, MAX_THREADS = 256 };

struct Pool {
  int threads;
  _Alignas(64) atomic_uint job;      // number of the current job; workers wait for the next one
  _Alignas(64) atomic_uint phase;    // of the current job
  _Alignas(64) atomic_int arrived;   // threads at the barrier
  _Alignas(64) atomic_int ticket[2]; // next item of a phase, by its parity
  _Alignas(64) atomic_int sleepers;
  Body *body;
  void *arg;
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

static void change(Pool *pool, atomic_uint *word) {
  atomic_fetch_add(word, 1);
  if (atomic_load(&pool->sleepers)) {
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
  }
}

void barrier(Worker *worker) {
  Pool *pool = worker->pool;
  unsigned phase = worker->phase++;
  if (atomic_fetch_add(&pool->arrived, 1) + 1 < pool->threads) {
    wait_for_change(pool, &pool->phase, phase);
    return;
  }
  atomic_store(&pool->arrived, 0);
  atomic_store(&pool->ticket[(phase + 1) & 1], 0);
  change(pool, &pool->phase);
}

int claim(Worker *worker, int count) { return atomic_fetch_add(&worker->pool->ticket[worker->phase & 1], count); }

int pool_threads(const Pool *pool) { return pool->threads; }

typedef struct { Pool *pool; int id; } Start;

static void *work(void *arg) {
  Start start = *(Start *)arg;
  Pool *pool = start.pool;
  free(arg);
  for (unsigned job = 0;; job++) {
    wait_for_change(pool, &pool->job, job);
    if (pool->stop) return NULL;
    Worker worker = {pool, start.id, atomic_load(&pool->phase)};
    pool->body(pool->arg, &worker);
    barrier(&worker);
  }
}

void pool_run(Pool *pool, Body *body, void *arg) {
  Worker worker = {pool, 0, atomic_load(&pool->phase)};
  pool->body = body;
  pool->arg = arg;
  change(pool, &pool->job);
  body(arg, &worker);
  barrier(&worker);
}

void tf_pool_free(Pool *pool) {
  pool->stop = 1;
  change(pool, &pool->job);
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
