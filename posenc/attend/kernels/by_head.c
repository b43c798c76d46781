/* Attention in bfloat16, one head at a time, so that scores stay in the cache, and only over keys
   that are seen: forward, and backward for short rows. For processors that multiply bfloat16 in
   vectors; where they do it in tiles (AMX), oneDNN's products were measured instead. Called by
   by_head.py. */

#include "products.h"
#include <math.h>

#ifdef BF16_IN_VECTORS
/* Query i sees the keys up to i + shift, and of them those that `visible` shows, if there is one.
   `group` query heads share keys and values; in the backward pass 1 does. What is read has strides
   of batch, head and row, counted in numbers, and its last axis side by side; what is written is
   (batch, len, heads, width) in one piece. */
typedef struct {
  int64_t batch, heads, group, rows, keys, width, v_width, shift;
  int64_t q_step[3], k_step[3], v_step[3], grad_step[3], bias_step[3], visible_step[3];
  double scale;
} Shape;

#define HIDDEN -3e38f
#define HEAD(t, step) ((t) + b * of->step[0] + h * of->step[1])
#define SHARED(t, step) ((t) + b * of->step[0] + h / of->group * of->step[1])
#define NEW(t, row, len, width) ((t) + ((b * (len) + (row)) * of->heads + h) * (width))

static inline int64_t seen(const Shape *of, int64_t row) {
  int64_t end = row + of->shift + 1;
  return row >= of->rows || end < 0 ? 0 : least(end, of->keys);
}

/* Products become weights: softmax(scale * s + bias) over the first `end` keys that are visible and
   have no bias of -inf. A row that sees no key gives zeros. Returns its log-sum-exp. */
static float soften(float *s, const float *bias, const uint8_t *visible, int64_t end, float scale,
                   bf16 *weights) {
  __m512 hidden = _mm512_set1_ps(HIDDEN), most = hidden, sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < end; j += 16) {
    __mmask16 see = half(j, end);
    __m512 r = _mm512_mul_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(scale));
    if (bias) {
      __m512 add = _mm512_maskz_loadu_ps(see, bias + j);
      see = _mm512_mask_cmp_ps_mask(see, add, hidden, _CMP_NLE_UQ);
      r = _mm512_add_ps(r, add);
    }
    if (visible) {
      __m128i shown = _mm_maskz_loadu_epi8(half(j, end), visible + j);
      see = _mm_mask_test_epi8_mask(see, shown, shown);
    }
    r = _mm512_mask_mov_ps(hidden, see, r);
    most = _mm512_max_ps(r, most);
    _mm512_storeu_ps(s + j, r);
  }
  most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  for (int64_t j = 0; j < end; j += 16) {
    __m512 r = _mm512_loadu_ps(s + j);
    __mmask16 see = _mm512_cmp_ps_mask(r, hidden, _CMP_NLE_UQ); /* a NaN is seen */
    r = _mm512_maskz_mov_ps(see, powers(_mm512_sub_ps(r, most)));
    sum = _mm512_add_ps(sum, r);
    _mm512_storeu_ps(s + j, r);
  }
  float total = _mm512_reduce_add_ps(sum);
  __m512 share = _mm512_set1_ps(total == 0 ? 0 : 1 / total);
  for (int64_t j = 0; j < end; j += 32) {
    __m512 low = _mm512_loadu_ps(s + j), high = _mm512_loadu_ps(s + j + 16);
    high = _mm512_maskz_mov_ps(half(j + 16, end), high);
    low = _mm512_mul_ps(low, share), high = _mm512_mul_ps(high, share);
    _mm512_storeu_si512(weights + j, narrow_32(low, high));
  }
  return total == 0 ? -INFINITY : _mm512_cvtss_f32(most) + logf(total);
}

/* From weights and the gradient g that reaches them to that of the products q . k; that of the bias
   is added up in float32. */
static void harden(const bf16 *weights, float *g, float *grad_bias, int64_t end, float scale,
                   bf16 *grad) {
  __m512 sum = _mm512_setzero_ps(), mean = sum, factor = _mm512_set1_ps(scale);
  for (int64_t j = 0; j < end; j += 16) {
    __m512 w = widen_16(_mm256_loadu_si256((const __m256i *)(weights + j)));
    __mmask16 some = _mm512_test_epi32_mask(_mm512_castps_si512(w), _mm512_castps_si512(w));
    mean = _mm512_mask3_fmadd_ps(w, _mm512_loadu_ps(g + j), mean, some);
    sum = _mm512_add_ps(sum, w);
  }
  float total = _mm512_reduce_add_ps(sum); /* rounded weights: what all keys share must cancel */
  mean = _mm512_set1_ps(total == 0 ? 0 : _mm512_reduce_add_ps(mean) / total);
  for (int64_t j = 0; j < full(end); j += 32) {
    __m512 r[2];
    for (int i = 0; i < 2; i++) {
      int64_t at = j + 16 * i;
      __m512 w = widen_16(_mm256_loadu_si256((const __m256i *)(weights + at)));
      __mmask16 some = _mm512_test_epi32_mask(_mm512_castps_si512(w), _mm512_castps_si512(w));
      r[i] = _mm512_maskz_mul_ps(some, w, _mm512_sub_ps(_mm512_loadu_ps(g + at), mean));
      if (grad_bias) {
        __m512 before = _mm512_maskz_loadu_ps(half(at, end), grad_bias + at);
        _mm512_mask_storeu_ps(grad_bias + at, half(at, end), _mm512_add_ps(before, r[i]));
      }
    }
    r[0] = _mm512_mul_ps(r[0], factor), r[1] = _mm512_mul_ps(r[1], factor);
    _mm512_storeu_si512(grad + j, narrow_32(r[0], r[1]));
  }
}

typedef struct {
  const bf16 *q, *k, *v;
  const float *bias;
  const uint8_t *visible;
  const int64_t *begin;
  bf16 *weights, *out;
  float *lse;
  Shape shape;
} Forward;

/* out = softmax(scale * q k^T + bias) v for items first..last of (batch, heads). Weights, (batch,
   heads, full(rows), full(keys)), are kept for the backward pass, if they are given: of each block
   of rows, up to the last key that it sees. `begin`, if given, is the first key of each head that
   the last row sees; each row before it begins a key earlier. Returns 1 where there is no memory. */
int attend(const Forward *given, int64_t first, int64_t last) {
  const bf16 *q = given->q, *k = given->k, *v = given->v;
  const float *bias = given->bias;
  const uint8_t *visible = given->visible;
  const int64_t *begin = given->begin;
  const Shape *of = &given->shape;
  bf16 *weights = given->weights, *out = given->out;
  float *lse = given->lse;
  int64_t R = full(of->rows), N = full(of->keys), W = full(of->width), V = full(of->v_width);
  char *memory = aligned_alloc(64, 2 * N * (W + V) + BLOCK * (6 * N + 4 * W + 4 * V));
  if (!memory) return 1;
  char *room = memory;
  bf16 *queries = carve(&room, 2 * BLOCK * W), *spare = carve(&room, 2 * BLOCK * W);
  pair *keys = carve(&room, 2 * N * W), *values = carve(&room, 2 * N * V);
  float *scores = carve(&room, 4 * BLOCK * N), *result = carve(&room, 4 * BLOCK * V);
  bf16 *passing = carve(&room, 2 * BLOCK * N);
  for (int64_t item = first; item < last; item++) {
    int64_t b = item / of->heads, h = item % of->heads;
    turn(SHARED(k, k_step), of->k_step[2], of->keys, of->width, spare, keys, PANEL(W));
    weave(SHARED(v, v_step), of->v_step[2], of->keys, of->v_width, values, PANEL(N));
    for (int64_t top = 0; top < of->rows; top += BLOCK) {
      int64_t rows = least(BLOCK, of->rows - top), block = full(seen(of, top + rows - 1));
      bf16 *w = weights ? weights + ((b * of->heads + h) * R + top) * N : passing;
      int64_t from = begin ? begin[h] - (of->rows - 1 - top) : 0;
      from = from < 0 ? 0 : least(from / BLOCK * BLOCK, block);
      take(HEAD(q, q_step) + top * of->q_step[2], of->q_step[2], rows, of->width, queries);
      multiply((pair *)queries, W / 2, 1, keys + from / BLOCK * PANEL(W), PANEL(W), scores, N,
               BLOCK, block - from, W / 2, 0);
      for (int64_t i = 0; i < BLOCK; i++) {
        int64_t row = top + i, end = seen(of, row) - from;
        end = end < 0 ? 0 : end;
        const float *add = bias ? HEAD(bias, bias_step) + row * of->bias_step[2] + from : NULL;
        const uint8_t *see =
            visible ? HEAD(visible, visible_step) + row * of->visible_step[2] + from : NULL;
        float size = soften(scores + i * N, add, see, end, of->scale, w + i * N);
        memset(w + i * N + full(end), 0, (block - from - full(end)) * sizeof *w);
        if (lse && i < rows) lse[(b * of->heads + h) * of->rows + row] = size;
      }
      multiply((pair *)w, N / 2, 1, values + from / 2 * BLOCK, PANEL(N), result, V, BLOCK, V,
               (block - from) / 2, 0);
      put(result, rows, of->v_width, NEW(out, top, of->rows, of->v_width),
          of->heads * of->v_width);
    }
  }
  free(memory);
  return 0;
}

typedef struct {
  const bf16 *q, *k, *v, *weights, *grad;
  bf16 *grad_q, *grad_k, *grad_v;
  float *grad_bias;
  Shape shape;
} Backward;

/* The gradients of q, k, v, and that of the bias, which is added to what is there, for heads
   first..last. */
int attend_backward(const Backward *given, int64_t first, int64_t last) {
  const bf16 *q = given->q, *k = given->k, *v = given->v, *grad = given->grad;
  const bf16 *weights = given->weights;
  bf16 *grad_q = given->grad_q, *grad_k = given->grad_k, *grad_v = given->grad_v;
  float *grad_bias = given->grad_bias;
  const Shape *of = &given->shape;
  int64_t R = full(of->rows), N = full(of->keys), W = full(of->width), V = full(of->v_width);
  int64_t wide = W > V ? W : V;
  char *memory = aligned_alloc(64, 2 * R * (W + 2 * V + 2 * N) + 2 * N * (W + V) +
                                       BLOCK * (6 * N + 2 * V + 4 * wide));
  if (!memory) return 1;
  char *room = memory;
  pair *q_rows = carve(&room, 2 * R * W), *g_rows = carve(&room, 2 * R * V);
  pair *k_rows = carve(&room, 2 * N * W), *values = carve(&room, 2 * N * V);
  pair *w_rows = carve(&room, 2 * R * N), *s_rows = carve(&room, 2 * R * N);
  bf16 *g = carve(&room, 2 * R * V), *spare = carve(&room, 2 * BLOCK * V);
  bf16 *part = carve(&room, 2 * BLOCK * N);
  float *scores = carve(&room, 4 * BLOCK * N), *result = carve(&room, 4 * BLOCK * wide);
  for (int64_t b = 0; b < of->batch; b++)
    for (int64_t h = first; h < last; h++) {
      weave(HEAD(q, q_step), of->q_step[2], of->rows, of->width, q_rows, PANEL(R));
      weave(HEAD(k, k_step), of->k_step[2], of->keys, of->width, k_rows, PANEL(N));
      turn(HEAD(v, v_step), of->v_step[2], of->keys, of->v_width, spare, values, PANEL(V));
      take(HEAD(grad, grad_step), of->grad_step[2], of->rows, of->v_width, g);
      weave(g, V, R, V, g_rows, PANEL(R));
      for (int64_t top = 0; top < of->rows; top += BLOCK) {
        int64_t rows = least(BLOCK, of->rows - top), block = full(seen(of, top + rows - 1));
        const bf16 *w = weights + ((b * of->heads + h) * R + top) * N;
        multiply((pair *)(g + top * V), V / 2, 1, values, PANEL(V), scores, N, BLOCK, block, V / 2,
                 0);
        for (int64_t i = 0; i < BLOCK; i++) {
          int64_t row = (top + i) * of->bias_step[2];
          float *add = grad_bias && i < rows ? HEAD(grad_bias, bias_step) + row : NULL;
          harden(w + i * N, scores + i * N, add, least(block, of->keys), of->scale, part + i * N);
        }
        multiply((pair *)part, N / 2, 1, k_rows, PANEL(N), result, W, BLOCK, W, block / 2, 0);
        put(result, rows, of->width, NEW(grad_q, top, of->rows, of->width), of->heads * of->width);
        weave(w, N, BLOCK, block, w_rows + top / 2 * BLOCK, PANEL(R));
        weave(part, N, BLOCK, block, s_rows + top / 2 * BLOCK, PANEL(R));
      }
      for (int64_t at = 0; at < of->keys; at += BLOCK) { /* rows that see the block of keys */
        int64_t row = at - of->shift; /* the first, of which pairs are read */
        int64_t from = row < 0 ? 0 : row < of->rows ? row / 2 : R / 2;
        int64_t keys = least(BLOCK, of->keys - at), steps = R / 2 - from;
        const pair *s = s_rows + at / BLOCK * PANEL(R), *w = w_rows + at / BLOCK * PANEL(R);
        from *= BLOCK;
        multiply(s + from, 1, BLOCK, q_rows + from, PANEL(R), result, W, BLOCK, W, steps, 0);
        put(result, keys, of->width, NEW(grad_k, at, of->keys, of->width), of->heads * of->width);
        multiply(w + from, 1, BLOCK, g_rows + from, PANEL(R), result, V, BLOCK, V, steps, 0);
        put(result, keys, of->v_width, NEW(grad_v, at, of->keys, of->v_width),
            of->heads * of->v_width);
      }
    }
  free(memory);
  return 0;
}
#endif
