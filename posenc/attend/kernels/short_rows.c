/* Softmax over short rows of bfloat16 scores, and its backward pass, both in place: one read and one
   write of the scores for scale, bias, mask and softmax. Sums are in float32. Called by
   short_rows.py. */

#include "floats.h"

/* Scores are (batch, heads, rows, keys) in one piece. Query i sees the keys up to i + shift, and of
   them those that `visible` shows, if there is one. Strides of batch, head and row count numbers;
   bias and visible have their keys side by side. */
typedef struct {
  int64_t batch, heads, rows, keys, shift, bias_step[3], visible_step[3];
  double scale;
} Shape;

#define MOST 512 /* keys */
#define LANES 32 /* keys that are done together: what lies beyond the end of a row is hidden */
#define HIDDEN -3e38f

/* Row by row for heads first..last: what is at `scores`, where its keys end, its place in others. */
#define EACH_ROW                                                                                   \
  for (int64_t b = 0; b < shape.batch; b++)                                                        \
    for (int64_t h = first; h < last; h++)                                                         \
      for (int64_t i = 0; i < shape.rows; i++)
#define ROW(name) (of->name + ((b * shape.heads + h) * shape.rows + i) * shape.keys)
#define PLACE(name, step) (of->name + b * shape.step[0] + h * shape.step[1] + i * shape.step[2])

static inline int64_t within(int64_t end, int64_t keys) {
  return end < 0 ? 0 : end < keys ? end : keys;
}

typedef struct {
  bf16 *scores;
  const float *bias;
  const uint8_t *visible;
  Shape shape;
} Softmax;

int softmax(const Softmax *of, int64_t first, int64_t last) {
  const Shape shape = of->shape;
  const float scale = shape.scale;
  EACH_ROW {
    bf16 *s = ROW(scores);
    int64_t end = within(i + shape.shift + 1, shape.keys);
    int64_t full = within((end + LANES - 1) / LANES * LANES, shape.keys);
    float r[MOST], most = HIDDEN, sum = 0;
    for (int64_t j = 0; j < full; j++) r[j] = widen(s[j]) * scale;
    if (of->bias) {
      const float *add = PLACE(bias, bias_step);
      for (int64_t j = 0; j < full; j++) r[j] += add[j];
    }
    if (of->visible) {
      const uint8_t *see = PLACE(visible, visible_step);
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
    memset(s + full, 0, (shape.keys - full) * sizeof *s);
  }
  return 0;
}

typedef struct {
  const bf16 *weights;
  bf16 *grad;
  float *grad_bias;
  Shape shape;
} SoftmaxBackward;

/* From weights and the gradient that reaches them to the gradient of the products q . k, in the
   place of the latter; that of the bias is added up in float32. */
int softmax_backward(const SoftmaxBackward *of, int64_t first, int64_t last) {
  const Shape shape = of->shape;
  const float scale = shape.scale;
  EACH_ROW {
    const bf16 *w = ROW(weights);
    bf16 *g = ROW(grad);
    int64_t end = within(i + shape.shift + 1, shape.keys);
    int64_t full = within((end + LANES - 1) / LANES * LANES, shape.keys);
    float r[MOST], mean = 0, sum = 0;
#pragma omp simd reduction(+ : mean, sum)
    for (int64_t j = 0; j < full; j++) {
      mean += w[j] ? widen(w[j]) * widen(g[j]) : 0;
      sum += widen(w[j]);
    }
    mean = sum == 0 ? 0 : mean / sum; /* rounded weights: what all keys share must cancel */
    for (int64_t j = 0; j < full; j++) r[j] = w[j] ? widen(w[j]) * (widen(g[j]) - mean) : 0;
    if (of->grad_bias) {
      float *add = PLACE(grad_bias, bias_step);
      for (int64_t j = 0; j < full; j++) add[j] += r[j];
    }
    for (int64_t j = 0; j < full; j++) g[j] = narrow(r[j] * scale);
    memset(g + full, 0, (shape.keys - full) * sizeof *g);
  }
  return 0;
}
