/* What a layer does between its products, each in one read and one write: RMSNorm in float32 and the
   gate of SwiGLU in bfloat16, forward and backward. Called by norms.py and swiglu.py. */

#include "floats.h"
#include <math.h>

/* 1 / (1 + e^-x) within 4e-7. */
static inline float sigmoid(float x) {
  return 1 / (1 + power(x < -87.f ? 87.f : x > 87.f ? -87.f : -x));
}

/* out = x * inverse * weight, inverse = 1 / sqrt(mean(x^2) + eps), for rows first..last. */
typedef struct {
  const float *x, *weight;
  float *out, *inverse;
  int64_t width;
  double eps;
} Norm;

int rms(const Norm *of, int64_t first, int64_t last) {
  const float *weight = of->weight;
  int64_t width = of->width;
  for (int64_t n = first; n < last; n++) {
    const float *row = of->x + n * width;
    float *restrict out = of->out + n * width, sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += row[i] * row[i];
    float r = of->inverse[n] = 1 / sqrtf(sum / width + (float)of->eps);
    for (int64_t i = 0; i < width; i++) out[i] = row[i] * r * weight[i];
  }
  return 0;
}

/* Blocks first..last of `block` rows, each of which has a row of its own to add up grad_weight: so
   the sum of those is the same however the blocks are shared out. */
typedef struct {
  const float *grad, *x, *weight, *inverse;
  float *grad_x, *grad_weight;
  int64_t width, rows, block;
} NormBackward;

int rms_backward(const NormBackward *of, int64_t first, int64_t last) {
  const float *weight = of->weight;
  int64_t width = of->width, end = last * of->block < of->rows ? last * of->block : of->rows;
  memset(of->grad_weight + first * width, 0, (last - first) * width * sizeof(float));
  for (int64_t n = first * of->block; n < end; n++) {
    const float *g = of->grad + n * width, *row = of->x + n * width;
    float *restrict grad_weight = of->grad_weight + n / of->block * width;
    float *restrict grad_x = of->grad_x + n * width, r = of->inverse[n], along = 0;
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < width; i++) along += g[i] * weight[i] * row[i];
    along *= r * r * r / width;
    for (int64_t i = 0; i < width; i++) {
      grad_weight[i] += g[i] * row[i] * r;
      grad_x[i] = g[i] * weight[i] * r - row[i] * along;
    }
  }
  return 0;
}

/* out = gate * sigmoid(gate) * up for rows first..last; gate and up stand side by side in a row. */
typedef struct {
  const bf16 *gate_up;
  bf16 *out;
  int64_t width;
} Gate;

int swiglu(const Gate *of, int64_t first, int64_t last) {
  int64_t width = of->width;
  for (int64_t n = first; n < last; n++) {
    const bf16 *gate = of->gate_up + 2 * n * width, *up = gate + width;
    bf16 *restrict out = of->out + n * width;
    for (int64_t i = 0; i < width; i++) {
      float a = widen(gate[i]);
      out[i] = narrow(a * sigmoid(a) * widen(up[i]));
    }
  }
  return 0;
}

typedef struct {
  const bf16 *grad, *gate_up;
  bf16 *grad_gate_up;
  int64_t width;
} GateBackward;

int swiglu_backward(const GateBackward *of, int64_t first, int64_t last) {
  int64_t width = of->width;
  for (int64_t n = first; n < last; n++) {
    const bf16 *gate = of->gate_up + 2 * n * width, *up = gate + width, *g = of->grad + n * width;
    bf16 *restrict d_gate = of->grad_gate_up + 2 * n * width, *restrict d_up = d_gate + width;
    for (int64_t i = 0; i < width; i++) {
      float a = widen(gate[i]), s = sigmoid(a), y = widen(g[i]);
      d_up[i] = narrow(y * a * s);
      d_gate[i] = narrow(y * widen(up[i]) * s * (1 + a * (1 - s)));
    }
  }
  return 0;
}
