/* Attention of a few queries over many keys: each head's keys and values are passed over once by
   each query that reads them, one after the other while they are in the cache. Called by
   few_queries.py. */

#include "floats.h"
#include <math.h>
#include <stdlib.h>

/* Strides of batch, head and row count numbers; keys of bias and visible, and the last axis of the
   rest, have their numbers side by side. `out` is (batch, heads, rows, v_width) in one piece. */
#define PROBLEM(T)                                                                                 \
  typedef struct {                                                                                 \
    const T *q, *k, *v;                                                                            \
    const float *bias;                                                                             \
    const uint8_t *visible;                                                                        \
    T *out;                                                                                        \
    int64_t batch, heads, kv_heads, rows, keys, width, v_width;                                    \
    int64_t q_step[3], k_step[3], v_step[3], bias_step[3], visible_step[3];                        \
    double scale;                                                                                  \
  } Problem_##T;

#define PLACE(name, row)                                                                           \
  (of->name + b * of->name##_step[0] + h * of->name##_step[1] + (row) * of->name##_step[2])

/* Products become weights, of which a row that sees no key has none. */
static void soften(float *s, const float *bias, const uint8_t *visible, int64_t keys) {
  float most = -INFINITY, sum = 0;
  if (bias)
    for (int64_t j = 0; j < keys; j++) s[j] += bias[j];
  if (visible)
    for (int64_t j = 0; j < keys; j++) s[j] = visible[j] ? s[j] : -INFINITY;
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < keys; j++) most = s[j] > most ? s[j] : most;
  most = most == -INFINITY ? 0 : most;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < keys; j++) sum += s[j] = exponential(s[j] - most);
  float share = sum == 0 ? 0 : 1 / sum;
  for (int64_t j = 0; j < keys; j++) s[j] *= share;
}

/* A constant width keeps a vector of sums in registers. */
#define BY_WIDTH(function, width, ...)                                                             \
  (width == 64    ? function(__VA_ARGS__, 64)                                                      \
   : width == 128 ? function(__VA_ARGS__, 128)                                                     \
                  : function(__VA_ARGS__, width))

#define PIECE 64 /* keys that are added up apart, so that small numbers are not lost in large sums */

/* Groups first..last of (batch, kv_heads). Returns 1 where there is no memory. */
#define ATTEND(T)                                                                                  \
  PROBLEM(T)                                                                                       \
  static inline void multiply_##T(const float *q, const T *k, int64_t step, int64_t keys,          \
                                  float scale, float *s, int64_t width) {                          \
    for (int64_t j = 0; j < keys; j++, k += step) {                                                \
      float sum = 0;                                                                               \
      _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < width; i++)                   \
          sum += q[i] * load_##T(k[i]);                                                            \
      s[j] = sum * scale;                                                                          \
    }                                                                                              \
  }                                                                                                \
  static inline void gather_##T(const float *w, const T *v, int64_t step, int64_t keys,            \
                                float *restrict part, float *restrict sum, int64_t width) {        \
    for (int64_t i = 0; i < width; i++) sum[i] = 0;                                                \
    for (int64_t at = 0; at < keys; at += PIECE) {                                                 \
      int64_t end = at + PIECE < keys ? at + PIECE : keys;                                         \
      for (int64_t i = 0; i < width; i++) part[i] = 0;                                             \
      for (int64_t j = at; j < end; j++)                                                           \
        if (w[j] != 0) /* what is hidden may be NaN */                                             \
          for (int64_t i = 0; i < width; i++) part[i] += w[j] * load_##T(v[j * step + i]);         \
      for (int64_t i = 0; i < width; i++) sum[i] += part[i];                                       \
    }                                                                                              \
  }                                                                                                \
  int attend_##T(const Problem_##T *of, int64_t first, int64_t last) {                             \
    int64_t group = of->heads / of->kv_heads, count = group * of->rows;                            \
    int64_t widest = of->width > of->v_width ? of->width : of->v_width;                            \
    float *scores = malloc(sizeof(float) * (count * of->keys + 2 * widest));                       \
    if (!scores) return 1;                                                                         \
    float *one = scores + count * of->keys, *part = one + widest;                                  \
    for (int64_t item = first; item < last; item++) {                                              \
      int64_t b = item / of->kv_heads, shared = item % of->kv_heads;                               \
      const T *keys = of->k + b * of->k_step[0] + shared * of->k_step[1];                          \
      const T *values = of->v + b * of->v_step[0] + shared * of->v_step[1];                        \
      for (int64_t n = 0; n < count; n++) {                                                        \
        int64_t h = shared * group + n / of->rows, row = n % of->rows;                             \
        const T *query = PLACE(q, row);                                                            \
        float *s = scores + n * of->keys;                                                          \
        for (int64_t i = 0; i < of->width; i++) one[i] = load_##T(query[i]);                       \
        BY_WIDTH(multiply_##T, of->width, one, keys, of->k_step[2], of->keys, of->scale, s);       \
        soften(s, of->bias ? PLACE(bias, row) : NULL,                                              \
               of->visible ? PLACE(visible, row) : NULL, of->keys);                                \
      }                                                                                            \
      for (int64_t n = 0; n < count; n++) {                                                        \
        int64_t h = shared * group + n / of->rows, row = n % of->rows;                             \
        T *to = of->out + ((b * of->heads + h) * of->rows + row) * of->v_width;                    \
        BY_WIDTH(gather_##T, of->v_width, scores + n * of->keys, values, of->v_step[2], of->keys,  \
                 part, one);                                                                       \
        for (int64_t i = 0; i < of->v_width; i++) to[i] = store_##T(one[i]);                       \
      }                                                                                            \
    }                                                                                              \
    free(scores);                                                                                  \
    return 0;                                                                                      \
  }

ATTEND(f32)
ATTEND(bf16)
