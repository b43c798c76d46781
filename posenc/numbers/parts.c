/* Share the work of a C function out among the threads of an OpenMP that is loaded already, which
   is cheaper than to wake threads of our own. Called by native.py. */

#include <stdint.h>

typedef int (*Part)(const void *arguments, int64_t first, int64_t last);

typedef struct {
  Part part;
  const void *arguments;
  int64_t count;
  int (*which)(void), (*threads)(void);
  int failed;
} Work;

static void one_share(void *data) {
  Work *work = data;
  int64_t i = work->which(), n = work->threads();
  if (work->part(work->arguments, work->count * i / n, work->count * (i + 1) / n))
    __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
}

/* part(arguments, first, last) for 0 .. count; whether one of them failed. The last three are
   GOMP_parallel, omp_get_thread_num and omp_get_num_threads. */
int share(Part part, const void *arguments, int64_t count, int64_t threads,
          void (*parallel)(void (*)(void *), void *, unsigned, unsigned), int (*which)(void),
          int (*all)(void)) {
  Work work = {part, arguments, count, which, all, 0};
  parallel(one_share, &work, (unsigned)threads, 0);
  return work.failed;
}
