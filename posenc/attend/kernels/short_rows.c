/* Softmax over short rows of bfloat16 scores, and its backward pass, both in place: one read and one
   write of the scores for scale, bias, mask and softmax. Sums are in float32. Called by
   short_rows.py. */

#include "floats.h"

/* Scores are (batch, heads, rows, keys) in one piece. Query i sees the keys up to i + shift, and of
   them those that `visible` shows, if there is one. Strides count numbers; bias and visible have
   their keys side by side. */
typedef struct {
  int64_t batch, heads, rows, keys, shift;
  int64_t bias_batch, bias_head, bias_row, visible_batch, visible_head, visible_row;
  float scale;
} Shape;

#define MOST 512 /* keys */
#define LANES 32 /* keys that are done together: what lies beyond the end of a row is hidden */
#define HIDDEN -3e38f

/* Row by row for heads first..last: what is at `scores`, where its keys end, its place in others. */
#define EACH_ROW                                                                                   \
  for (int64_t b = 0; b < of->batch; b++)                                                          \
    for (int64_t h = first; h < last; h++)                                                         \
      for (int64_t i = 0; i < of->rows; i++)
#define ROW(t) ((t) + ((b * of->heads + h) * of->rows + i) * of->keys)
#define PLACE(t, name) ((t) + b * of->name##_batch + h * of->name##_head + i * of->name##_row)

static inline int64_t within(int64_t end, int64_t keys) {
  return end < 0 ? 0 : end < keys ? end : keys;
}

void softmax(bf16 *scores, const float *bias, const uint8_t *visible, const Shape *of,
             int64_t first, int64_t last) {
  EACH_ROW {
    bf16 *s = ROW(scores);
    int64_t end = within(i + of->shift + 1, of->keys);
    int64_t full = within((end + LANES - 1) / LANES * LANES, of->keys);
    float r[MOST], most = HIDDEN, sum = 0;
    for (int64_t j = 0; j < full; j++) r[j] = widen(s[j]) * of->scale;
    if (bias) {
      const float *add = PLACE(bias, bias);
      for (int64_t j = 0; j < full; j++) r[j] += add[j];
    }
    if (visible) {
      const uint8_t *see = PLACE(visible, visible);
      for (int64_t j = 0; j < full; j++) r[j] = see[j] ? r[j] : HIDDEN;
    }
    for (int64_t j = end; j < full; j++) r[j] = HIDDEN;
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < full; j++) most = r[j] > most ? r[j] : most;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < full; j++) {
      r[j] = r[j] <= HIDDEN ? 0 : exponential(r[j] - most);
      sum += r[j];
    }
    float share = sum == 0 ? 0 : 1 / sum; /* a row that sees no key gives zeros */
    for (int64_t j = 0; j < full; j++) s[j] = narrow(r[j] * share);
    memset(s + full, 0, (of->keys - full) * sizeof *s);
  }
}

/* From weights and the gradient that reaches them to the gradient of the products q . k, in the
   place of the latter; that of the bias is added up in float32. */
void softmax_backward(const bf16 *weights, bf16 *grad, float *grad_bias, const Shape *of,
                      int64_t first, int64_t last) {
  EACH_ROW {
    const bf16 *w = ROW(weights);
    bf16 *g = ROW(grad);
    int64_t end = within(i + of->shift + 1, of->keys);
    int64_t full = within((end + LANES - 1) / LANES * LANES, of->keys);
    float r[MOST], mean = 0, sum = 0;
#pragma omp simd reduction(+ : mean, sum)
    for (int64_t j = 0; j < full; j++) {
      mean += w[j] ? widen(w[j]) * widen(g[j]) : 0;
      sum += widen(w[j]);
    }
    mean = sum == 0 ? 0 : mean / sum; /* rounded weights: what all keys share must cancel */
    for (int64_t j = 0; j < full; j++) r[j] = w[j] ? widen(w[j]) * (widen(g[j]) - mean) : 0;
    if (grad_bias) {
      float *add = PLACE(grad_bias, bias);
      for (int64_t j = 0; j < full; j++) add[j] += r[j];
    }
    for (int64_t j = 0; j < full; j++) g[j] = narrow(r[j] * of->scale);
    memset(g + full, 0, (of->keys - full) * sizeof *g);
  }
}
