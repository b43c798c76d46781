/* What DeBERTa adds to the scores of one query, in one read of the near keys. Called by
   deberta_row.py. */

#include <stdint.h>

/* Strides of keys are those of batch, head and key. `from_query` may be NULL. */
typedef struct {
  float *bias, *far;
  const float *from_query;
  const int64_t *q_row;
  const float *keys;
  int64_t stride[3];
  const float *vectors;
  const int64_t *k_row;
  double scale;
  int64_t heads, kv_len, q_rows, k_rows, width;
} Row;

/* The first keys, most of a long past, share one vector, far[h] = scale vectors[h, k_row[0]], which
   the query takes; this writes it, and what is left to add to the scores:
   bias[n, j] = from_query[n, q_row[j]] + scale keys[n, j] . vectors[h, k_row[j]] - keys[n, j] . far.
   Rows first..last of (batch, heads); n is such a row, h its head. */
int add_to_one(const Row *of, int64_t first, int64_t last) {
  const float *from_query = of->from_query, scale = of->scale;
  const int64_t *q_row = of->q_row, *k_row = of->k_row, *stride = of->stride;
  int64_t heads = of->heads, kv_len = of->kv_len, width = of->width;
  int64_t near = 1;
  while (near < kv_len && k_row[near] == k_row[0]) near++;
  for (int64_t n = first; n < last; n++) {
    int64_t h = n % heads;
    const float *key = of->keys + n / heads * stride[0] + h * stride[1];
    const float *vector = of->vectors + h * of->k_rows * width, *shared = vector + k_row[0] * width;
    float *restrict out = of->bias + n * kv_len;
    if (n < heads)
      for (int64_t d = 0; d < width; d++) of->far[h * width + d] = scale * shared[d];
    for (int64_t j = 0; j < kv_len; j++)
      out[j] = from_query ? from_query[n * of->q_rows + q_row[j]] : 0;
    for (int64_t j = near; j < kv_len; j++) {
      const float *x = key + j * stride[2], *own = vector + k_row[j] * width;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < width; d++) sum += x[d] * (own[d] - shared[d]);
      out[j] += scale * sum;
    }
  }
  return 0;
}
