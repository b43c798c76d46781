/* What a layer does between its products, each in one read and one write: RMSNorm in float32 and the
   gate of SwiGLU in bfloat16, forward and backward. Called by norms.py and swiglu.py. */

#include "floats.h"
#include <math.h>

/* 1 / (1 + e^-x) within 4e-7. */
static inline float sigmoid(float x) {
  return 1 / (1 + power(x < -87.f ? 87.f : x > 87.f ? -87.f : -x));
}

/* out = x * inverse * weight, inverse = 1 / sqrt(mean(x^2) + eps), for rows first..last. */
void rms(const float *x, const float *weight, float *out, float *inverse, int64_t width, float eps,
         int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n++) {
    const float *row = x + n * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += row[i] * row[i];
    float r = inverse[n] = 1 / sqrtf(sum / width + eps);
    for (int64_t i = 0; i < width; i++) out[n * width + i] = row[i] * r * weight[i];
  }
}

/* grad_weight is added up from rows first..last. */
void rms_backward(const float *grad, const float *x, const float *weight, const float *inverse,
                  float *restrict grad_x, float *restrict grad_weight, int64_t width, int64_t first,
                  int64_t last) {
  for (int64_t n = first; n < last; n++) {
    const float *g = grad + n * width, *row = x + n * width;
    float r = inverse[n], along = 0;
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < width; i++) along += g[i] * weight[i] * row[i];
    along *= r * r * r / width;
    for (int64_t i = 0; i < width; i++) {
      grad_weight[i] += g[i] * row[i] * r;
      grad_x[n * width + i] = g[i] * weight[i] * r - row[i] * along;
    }
  }
}

/* out = gate * sigmoid(gate) * up; gate and up stand side by side in a row. */
void swiglu(const bf16 *gate_up, bf16 *restrict out, int64_t width, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n++) {
    const bf16 *gate = gate_up + 2 * n * width, *up = gate + width;
    for (int64_t i = 0; i < width; i++) {
      float a = widen(gate[i]);
      out[n * width + i] = narrow(a * sigmoid(a) * widen(up[i]));
    }
  }
}

void swiglu_backward(const bf16 *grad, const bf16 *gate_up, bf16 *restrict grad_gate_up,
                     int64_t width, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n++) {
    const bf16 *gate = gate_up + 2 * n * width, *up = gate + width, *g = grad + n * width;
    bf16 *d_gate = grad_gate_up + 2 * n * width, *d_up = d_gate + width;
    for (int64_t i = 0; i < width; i++) {
      float a = widen(gate[i]), s = sigmoid(a), y = widen(g[i]);
      d_up[i] = narrow(y * a * s);
      d_gate[i] = narrow(y * widen(up[i]) * s * (1 + a * (1 - s)));
    }
  }
}
