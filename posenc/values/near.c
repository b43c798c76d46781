/* What vectors by distance add to the values of near keys. Called by near.py. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* e^x within 3e-7; NaN stays NaN. */
static inline float power(float x) {
  float y = x < -87.f ? -87.f : x > 87.f ? 87.f : x;
  float turns = y * 1.44269504f + (y < 0 ? -.5f : .5f), power;
  int32_t whole = (int32_t)(turns == turns ? turns : 0), bits = (whole + 127) << 23;
  float r = y - whole * 0.693359375f + whole * 2.12194440e-4f, p = 1 / 120.f + r * (1 / 720.f);
  p = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * p))));
  memcpy(&power, &bits, sizeof power);
  return x < -87.f ? 0 : p * power;
}

/* Queries and keys of a head lie in one piece, and heads step numbers apart. */
typedef struct {
  float *out;
  const float *q, *k, *added, *lse, *table;
  int64_t shift, far, group, q_step, k_step, rows, keys, width;
  double scale;
} Near;

/* out[n, i] = table[far] + sum over the keys j at distance D = shift + i - j from 0 to far - 1 of
   w (table[D] - table[far]), w = exp(scale q[n, i] . k[n / group, j] + added[n, i, j] - lse[n, i]);
   0 for a row that sees no key; n from first to last. */
int near_values(const Near *of, int64_t first, int64_t last) {
  const float *q = of->q, *k = of->k, *added = of->added, *table = of->table, scale = of->scale;
  int64_t far = of->far, rows = of->rows, keys = of->keys, width = of->width;
  float weight[far];
  const float *end = table + far * width;
  for (int64_t n = first; n < last; n++)
    for (int64_t i = 0; i < rows; i++) {
      const float *mine = q + n * of->q_step + i * width, norm = of->lse[n * rows + i];
      float *restrict sum = of->out + (n * rows + i) * width;
      if (norm == -INFINITY) {
        memset(sum, 0, width * sizeof *sum);
        continue;
      }
      int64_t own = of->shift + i, begin = own - far + 1 > 0 ? own - far + 1 : 0;
      int64_t stop = own + 1 < keys ? own + 1 : keys;
      for (int64_t j = begin; j < stop; j++) {
        const float *theirs = k + n / of->group * of->k_step + j * width;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t d = 0; d < width; d++) dot += mine[d] * theirs[d];
        float more = added[(n * rows + i) * keys + j]; /* a hidden key may hold anything */
        weight[j - begin] = more == -INFINITY ? more : scale * dot + more - norm;
      }
      for (int64_t j = 0; j < stop - begin; j++) weight[j] = power(weight[j]);
      memcpy(sum, end, width * sizeof *sum);
      for (int64_t j = begin; j < stop; j++) {
        const float *vector = table + (own - j) * width, w = weight[j - begin];
        for (int64_t d = 0; d < width; d++) sum[d] += w * (vector[d] - end[d]);
      }
    }
  return 0;
}
