/* What the C files of this package share: bfloat16, and e^x in few instructions. */

#include <stdint.h>
#include <string.h>

typedef float f32;
typedef uint16_t bf16; /* the upper half of a float32 */

static inline float widen(bf16 v) {
  uint32_t bits = (uint32_t)v << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

/* Round to nearest, ties to even, as torch does; the carry must not turn a NaN into a number. */
static inline bf16 narrow(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? (bf16)0x7fc0 : (bf16)rounded;
}

/* The same names for both, for macros that are written for either. */
static inline float load_f32(f32 v) { return v; }
static inline f32 store_f32(float v) { return v; }
static inline float load_bf16(bf16 v) { return widen(v); }
static inline bf16 store_bf16(float v) { return narrow(v); }

/* e^x for -87 <= x <= 87 within 4e-7; NaN stays NaN. */
static inline float power(float x) {
  const float rounding = 12582912.f; /* 3 * 2^22: what is added to it becomes a whole number */
  float turns = x * 1.44269504f + rounding, scale;
  uint32_t bits;
  memcpy(&bits, &turns, sizeof bits);
  bits = (bits + 127) << 23; /* the whole number is in the lower bits, and becomes the exponent */
  turns -= rounding;
  float r = x - turns * 0.693359375f + turns * 2.12194440e-4f;
  float p = 1 / 24.f + r * (1 / 120.f + r * (1 / 720.f));
  p = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * p)));
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

/* e^x for x <= 0, 0 below -87. */
static inline float exponential(float x) { return x < -87.f ? 0 : power(x < -87.f ? -87.f : x); }
